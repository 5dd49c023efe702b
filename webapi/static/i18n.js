// The texts of the modules in the language of the page: the English sentence is the key, locales/*.json has the others.

/** The language that the server chose for the page, and for its own texts. */
export const language = document.documentElement.lang || "en";

/** Numbers and dates as the reader's browser writes them in that language: en-GB, say, on an English page. */
export const locale = navigator.languages.find((each) => each.split("-")[0] === language.split("-")[0]) ?? language;

/** None of English, and none when they do not come: the page works in English then. */
const texts = language === "en" ? {} : await fetch(new URL(`locales/${language}.json`, import.meta.url)).then((answer) => answer.json()).catch(() => ({}));

/** What the API says under a code in English alone, in the language of the page; undefined for what it translates itself. */
export const ofCode = (code) => texts[`problem:${code}`];

/** A text with the named values put in. */
export const filled = (text, values) => text.replace(/\{(\w+)\}/g, (whole, name) => String(values[name] ?? whole));

/** The text for an English one, with the named values put in. */
export const t = (text, values = {}) => filled(texts[text] ?? text, values);

/** The same of a number of things, as `{n}`: English has two forms, and the one for several is the key; the others have one form. */
export const tn = (one, many, n, values = {}) => filled(texts[many] ?? (n === 1 ? one : many), { n: new Intl.NumberFormat(locale).format(n), ...values });

/** The text for an English one as parts, for the nodes among them: `["Corrected with ", node, "."]`. */
export function parts(text, nodes) {
  return (texts[text] ?? text).split(/\{(\w+)\}/).map((each, i) => (i % 2 ? nodes[each] : each)).flat();
}
