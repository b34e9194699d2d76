// Keeps the page up to date: the server says that something changed, the page asks for its changed part.
"use strict";
const main = document.getElementById("main"), live = document.getElementById("live"), page = document.body.dataset.page;
const LIVE = new Set(["list", "run", "incident"]);
let busy = false, again = false, details = null, follow = null;

function say(on) {
  live.classList.toggle("on", on);
  live.innerHTML = on ? '<span aria-hidden="true">●</span> live' : '<span aria-hidden="true">○</span> not live';
}
// what the page says of a look grows older while it stands there
function shownFor(one) {
  one.dataset.shown ||= String(Date.now());
  return (Date.now() - Number(one.dataset.shown)) / 1000;
}
// as tr11ops/base/units.py says it
function duration(whole) {
  const left = whole % 60, minutes = Math.floor(whole / 60), hours = Math.floor(whole / 3600);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${minutes} min${left && whole < 600 ? ` ${left} s` : ""}`;
  if (whole < 86400) return `${hours} h ${String(minutes % 60).padStart(2, "0")} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}
function grow() {
  for (const one of main.querySelectorAll("[data-age]")) {
    if (one.dataset.age === "") continue;
    const seconds = Math.max(0, Math.floor(Number(one.dataset.age) + shownFor(one)));
    one.textContent = `${duration(seconds)} ago`;
  }
  for (const one of main.querySelectorAll("[data-old-after]")) {
    const isOld = Number(one.dataset.ofAge) + shownFor(one) > Number(one.dataset.oldAfter);
    one.children[0].hidden = isOld;
    one.children[1].hidden = !isOld;
  }
}
async function refresh() {
  if (busy) { again = true; return; }
  if (main.contains(document.activeElement) && document.activeElement.matches("input:not(#find):not(#log-find)")) return;
  busy = true;
  try {
    const answer = await fetch(location.pathname, {headers: {"X-Part": "1"}});
    if (answer.ok) put(await answer.text());
  } catch { say(false); }
  busy = false;
  if (again) { again = false; setTimeout(refresh, 1000); }
}
function put(text) {
  if (main.querySelector("button:active, a:active")) { again = true; return; }  // what is pressed stays until it is let go
  const fresh = document.createElement("div");
  fresh.innerHTML = text;
  const lines = document.getElementById("log-lines"), at = lines?.scrollTop;  // lost on the way
  const nameOf = one => one.id || one.closest("article")?.querySelector("h3")?.textContent;
  const were = new Map([...main.querySelectorAll("details")].map(one => [nameOf(one), one.open]));
  for (const one of fresh.querySelectorAll("details")) if (were.has(nameOf(one))) one.open = were.get(nameOf(one));
  for (const id of ["details", "log", "acts"]) {  // these keep what they show
    const old = main.querySelector("#" + id), made = fresh.querySelector("#" + id);
    if (old && made && (id !== "acts" || old.contains(document.activeElement))) made.replaceWith(old);
  }
  const find = main.querySelector("#find"), had = find === document.activeElement;
  if (find) fresh.querySelector("#find")?.replaceWith(find);
  const focused = document.activeElement?.getAttribute?.("href"), where = window.scrollY;
  main.replaceChildren(...fresh.childNodes);
  if (lines) lines.scrollTop = at;
  if (had) find.focus();
  else if (focused && document.activeElement === document.body) main.querySelector(`a[href="${CSS.escape(focused)}"]`)?.focus({preventScroll: true});
  window.scrollTo(0, where);
  filter();
  grow();
  fillReason();
}
// what a run does after an act, as its own page says it
async function now() {
  const place = document.getElementById("now");
  try {
    const answer = await fetch(place.dataset.from, {headers: {"X-Part": "1"}});
    if (!answer.ok) return;
    const fresh = document.createElement("div");
    fresh.innerHTML = await answer.text();
    const top = fresh.querySelector(".top");
    if (!top.dataset.brief) return;
    place.className = top.className;
    place.replaceChildren(top.querySelector(".state"), Object.assign(document.createElement("p"), {className: "lead", textContent: top.dataset.brief}));
    grow();
  } catch { /* the next change tries again */ }
}
function filter() {
  const find = document.getElementById("find");
  if (!find) return;
  const words = find.value.toLowerCase();
  for (const run of main.querySelectorAll(".run")) run.hidden = !run.dataset.text.includes(words);
}
// the reason that was typed last for this run serves for its next act too, as long as the tab is open, and
// leads what the page itself has filled in
const reasonOf = `reason ${location.pathname}`;
function fillReason() {
  const field = main.querySelector("input[name=reason]:not([type=hidden])");
  if (field && field.value === field.defaultValue) field.value = sessionStorage.getItem(reasonOf) || field.value;
}
async function load() {
  const place = document.getElementById("details");
  if (!place) return;
  try {
    const answer = await fetch(place.dataset.load, {headers: {"X-Part": "1"}});
    if (!answer.ok) return;
    const open = new Map([...place.querySelectorAll("details.part")].map(one => [one.id, one.open]));
    place.innerHTML = await answer.text();
    for (const one of place.querySelectorAll("details.part")) if (open.has(one.id)) one.open = open.get(one.id);
    document.body.append(Object.assign(document.createElement("script"), {src: "/assets/charts.js"}));
  } catch { /* the next round tries again */ }
}
async function log() {
  const place = document.getElementById("log");
  if (!place) return;
  const lines = document.getElementById("log-lines"), query = document.getElementById("log-find").value;
  try {
    const answer = await fetch(`${place.dataset.log}?q=${encodeURIComponent(query)}`);
    const found = await answer.json(), end = lines.scrollHeight - lines.scrollTop - lines.clientHeight < 30;
    lines.textContent = found.lines.length ? found.lines.join("\n") : found.why;
    if (end || !lines.dataset.seen) lines.scrollTop = lines.scrollHeight;
    lines.dataset.seen = "1";
  } catch { lines.textContent = "the server does not answer"; }
}
document.addEventListener("input", event => {
  if (event.target.id === "find") filter();
  if (event.target.name === "reason") sessionStorage.setItem(reasonOf, event.target.value);
  if (event.target.id === "log-find") { clearTimeout(details); details = setTimeout(log, 300); }
});
// only where the browser lets a page write to the clipboard: https, or this machine
if (navigator.clipboard) document.body.classList.add("can-copy");
document.addEventListener("click", event => {
  if (event.target.closest(".copy")) {
    const button = event.target.closest(".copy"), before = button.innerHTML;
    navigator.clipboard.writeText(button.dataset.copy).then(() => { button.textContent = "Copied"; }, () => { button.textContent = "Not copied"; });
    setTimeout(() => { button.innerHTML = before; }, 2000);
  }
  if (event.target.id !== "log-live") return;
  const on = event.target.getAttribute("aria-pressed") !== "true";
  event.target.setAttribute("aria-pressed", String(on));
  clearInterval(follow);
  if (on) { log(); follow = setInterval(log, 3000); }
});
document.addEventListener("keydown", event => {
  if (event.target.matches("input") || event.ctrlKey || event.metaKey || event.altKey) return;
  const links = [...main.querySelectorAll(".run:not([hidden]) .name")], at = links.indexOf(document.activeElement);
  const keys = {
    "/": () => document.querySelector("#find, #log-find")?.focus(),
    "j": () => links[Math.min(at + 1, links.length - 1)]?.focus(),
    "k": () => links[Math.max(at - 1, 0)]?.focus(),
    "u": () => { if (page !== "list") location.href = "/"; },
  };
  if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
});
if (page === "done") {
  now();
  setInterval(grow, 1000);
  new EventSource("/events").addEventListener("change", now);
}
if (LIVE.has(page)) {
  fillReason();
  grow();
  setInterval(grow, 1000);
  const stream = new EventSource("/events");
  let first = true;
  stream.addEventListener("change", () => { say(true); if (first) { first = false; return; } refresh(); });
  stream.onerror = () => say(false);
  setInterval(() => { if (!live.classList.contains("on")) refresh(); }, 30000);
  load(); log();
  if (page === "run") setInterval(load, 120000);
}
