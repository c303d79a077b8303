"use strict";

// Milliseconds between questions, and how long one may take.
const EVERY = 1000;
const LIMIT = 6000;
// Seconds of rates that are drawn.
const SAMPLES = 120;

const at = (id) => document.getElementById(id);
const rates = [];
const rows = new Map();
let seen = 0;

// Sets the text of an element if it has changed.
function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function make(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

function bar(name) {
  const box = make("div", "bar", make("i"));
  box.setAttribute("role", "progressbar");
  box.setAttribute("aria-label", name);
  return box;
}

function fill(box, share) {
  box.firstChild.style.setProperty("--share", share.toFixed(4));
  box.setAttribute("aria-valuenow", Math.round(share * 100));
}

function drawFacts(facts) {
  const place = at("facts");
  while (place.children.length > facts.length) place.lastChild.remove();
  facts.forEach((fact, number) => {
    let card = place.children[number];
    if (!card || card.dataset.name !== fact.name || !card.querySelector(".bar") !== !fact.share) {
      const parts = [make("h2", "", fact.name), make("p", "value")];
      if (fact.share) parts.push(bar(fact.name));
      const made = make("div", "fact", ...parts, make("p", "more"));
      made.dataset.name = fact.name;
      if (card) card.replaceWith(made); else place.append(made);
      card = made;
    }
    say(card.querySelector(".value"), fact.value);
    say(card.querySelector(".more"), fact.more);
    if (fact.share) {
      const box = card.querySelector(".bar");
      box.className = "bar " + fact.share.level;
      fill(box, fact.share.of_one);
    }
  });
}

function drawReading(reading) {
  at("reading").hidden = !reading;
  if (!reading) return;
  rates.push(reading);
  if (rates.length > SAMPLES) rates.shift();
  const peak = rates.reduce((most, one) => (one.bytes_per_second > most.bytes_per_second ? one : most));
  say(at("rate"), reading.text);
  say(at("peak"), "at most " + peak.text + " in two minutes");
  const most = Math.max(peak.bytes_per_second, 1);
  const place = (one, number) => {
    const x = 1000 - (rates.length - 1 - number) * (1000 / (SAMPLES - 1));
    return x.toFixed(1) + "," + (97 - 92 * (one.bytes_per_second / most)).toFixed(1);
  };
  const points = rates.map(place);
  const first = points[0].split(",")[0];
  at("line").setAttribute("d", "M" + points.join("L"));
  at("area").setAttribute("d", "M" + first + ",100L" + points.join("L") + "L1000,100Z");
}

function drawReplicas(replicas, heads) {
  at("replicas").hidden = !replicas;
  if (!replicas) return;
  say(at("count"), replicas.length === 1 ? "1 replica" : replicas.length + " replicas");
  at("none").hidden = replicas.length > 0;
  if (!at("heads").children.length) heads.forEach((head) => at("heads").append(make("th", "", head)));
  at("heads").hidden = replicas.length === 0;
  const present = new Set(replicas.map((replica) => replica.session));
  for (const [session, row] of rows) {
    if (!present.has(session)) {
      row.remove();
      rows.delete(session);
    }
  }
  replicas.forEach((replica, number) => {
    let row = rows.get(replica.session);
    if (!row) {
      row = make("tr");
      for (let cell = 0; cell < heads.length; cell += 1) row.append(make("td"));
      row.children[1].append(make("span"));
      row.children[2].append(make("div", "progress", bar(replica.name), make("span")));
      rows.set(replica.session, row);
    }
    const cells = row.children;
    say(cells[0], replica.name);
    cells[1].firstChild.className = "phase " + replica.phase;
    say(cells[1].firstChild, replica.phase);
    const [box, percent] = cells[2].firstChild.children;
    box.className = "bar " + replica.phase;
    fill(box, replica.share);
    say(percent, replica.percent);
    ["rate", "left", "lag", "by", "from", "joined", "silent"].forEach((field, after) => say(cells[3 + after], replica[field]));
    row.className = replica.is_silent ? "silent" : "";
    const place = at("rows");
    if (place.children[number] !== row) place.insertBefore(row, place.children[number] || null);
  });
}

// Only while they are seen: there can be thousands.
function drawFamilies(families) {
  if (!at("all").open) return;
  at("families").replaceChildren(
    ...families.map((family) => {
      const values = family.values.map((one) => {
        const parts = [one.of, one.of && one.text ? ": " : "", make("b", "", one.text)];
        return make("div", "", ...parts);
      });
      const name = make("td", "", make("code", "", family.name), make("p", "", family.help));
      return make("tr", "", name, make("td", "", ...values));
    }),
  );
}

let last = null;

function draw(shown) {
  last = shown;
  document.title = "Remora " + shown.agent + (shown.why ? ": not ready" : "");
  say(at("agent"), shown.agent);
  say(at("of"), shown.of);
  at("why").hidden = !shown.why;
  say(at("why"), shown.why);
  drawFacts(shown.facts);
  drawReading(shown.reading);
  drawReplicas(shown.replicas, shown.heads);
  drawFamilies(shown.families);
}

function drawState(trouble) {
  const state = at("state");
  if (trouble) {
    state.className = "state lost";
    const ago = seen ? ", last seen " + Math.round((Date.now() - seen) / 1000) + " s ago" : "";
    say(state, trouble + ago);
  } else {
    state.className = last.why ? "state waits" : "state ready";
    say(state, last.why ? "not ready" : "ready");
  }
}

async function ask() {
  const answer = await fetch("status.json", { cache: "no-store", signal: AbortSignal.timeout(LIMIT) });
  if (!answer.ok) throw new Error((await answer.text()).trim());
  return answer.json();
}

async function look() {
  if (!document.hidden) {
    try {
      const shown = await ask();
      const isFirst = !last;
      // An agent without facts has nothing else to show.
      if (isFirst && !shown.facts.length) at("all").open = true;
      draw(shown);
      seen = Date.now();
      drawState("");
    } catch (error) {
      drawState(error instanceof TypeError || error.name === "TimeoutError" ? "no answer" : error.message);
    }
  }
  setTimeout(look, EVERY);
}

at("all").addEventListener("toggle", () => last && drawFamilies(last.families));
look();
