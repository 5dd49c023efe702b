// Signing in leads to the part of the page that was asked for: a browser carries it over from where the form goes.

const form = document.querySelector("main form");
form.action += location.hash;
