// The form that submits a list.

import { attempt, upload } from "./api.js";
import { $, $$, drawBar, leave, setText, show, showProblem } from "./dom.js";

const form = $("#upload");
if (form) {
  const file = $("#file");
  $("#worker").addEventListener("change", showWorker);
  file.addEventListener("change", showFile);
  form.addEventListener("submit", (event) => { event.preventDefault(); send({}); });
  for (const kind of ["dragenter", "dragover"]) form.addEventListener(kind, (e) => { e.preventDefault(); $("#drop").classList.add("over"); });
  for (const kind of ["dragleave", "drop"]) form.addEventListener(kind, (e) => { e.preventDefault(); $("#drop").classList.remove("over"); });
  form.addEventListener("drop", (e) => {
    const { files } = e.dataTransfer;
    if (files.length === 0) return;
    if (files.length === 1) file.files = files;
    showProblem($("#problem"), files.length === 1 ? null : { detail: `You dropped ${files.length} files; a list is one. Drop them one after the other.` });
    showFile();
  });
  $("#send").disabled = false; // before this script the browser would send the form by itself, without a key
  // A browser that goes back fills the form in again after this script, without an event for each field.
  window.addEventListener("pageshow", () => { showWorker(); showFile(); });
}

function showWorker() {
  for (const each of $$("[data-worker]")) show(each, each.dataset.worker === $("#worker").value);
}

function size(bytes) {
  const units = ["bytes", "KiB", "MiB", "GiB"];
  let n = bytes;
  let i = 0;
  while (n >= 1024 && i < units.length - 1) { n /= 1024; i += 1; }
  return `${i ? n.toFixed(1) : n} ${units[i]}`;
}

const empty = form && { name: $("#file-name").textContent, about: $("#file-about").textContent };

/** Shows the file that would be sent. */
function showFile() {
  const chosen = $("#file").files[0];
  setText($("#file-name"), chosen ? chosen.name : empty.name);
  setText($("#file-about"), chosen ? size(chosen.size) : empty.about);
  $("#drop").classList.toggle("chosen", chosen !== undefined);
}

/** Sends again with one thing chosen. A sheet stays in the form: the corrected workbook has it too. An encoding does not. */
async function choose(name, value) {
  if (name === "sheet") $("#sheet").value = value;
  await send({ [name]: value });
}

let underWay = false;

async function send(options) {
  if (underWay || !form.reportValidity()) return;
  const chosen = $("#file").files[0];
  const limit = Number(form.dataset.maxBytes);
  if (chosen.size > limit) {
    showProblem($("#problem"), { detail: `${chosen.name} has ${size(chosen.size)}; at most ${size(limit)} are taken. Split it into several files.` });
    return;
  }
  underWay = true;
  await attempt($("#problem"), $("#send"), async () => {
    sending(0);
    const fields = new FormData(form);
    for (const [name, value] of Object.entries(options)) fields.set(name, value);
    const task = await upload(form.action, fields, sending);
    await leave(task.links.ui);
  }, choose);
  underWay = false;
  show($("#sending"), false);
}

function sending(share) {
  const whole = Math.floor(share * 100);
  show($("#sending"), true);
  const text = whole < 100 ? `Sending: ${whole} %` : "Sent; the first rows are being read…";
  drawBar($("#sending-bar"), [["finish", share]], { percent: whole, text });
  setText($("#sending-text"), text);
}
