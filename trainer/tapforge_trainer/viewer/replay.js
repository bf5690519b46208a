"use strict";
// Filters episodes by outcome and cards by template and text; shows steps of the same state together.
const form = document.getElementById("filter");
const cards = [...document.querySelectorAll(".card")];
const texts = new Map(cards.map((card) => [card, card.textContent.toLowerCase()]));

function filter() {
  const outcomes = new Set([...form.querySelectorAll("[name=outcome]:checked")].map((box) => box.value));
  const template = form.elements.template.value;
  const words = form.elements.words.value.trim().toLowerCase();
  let shown = 0;
  for (const card of cards) {
    const episodes = [...card.querySelectorAll(".episode")];
    const wanted = episodes.filter((episode) => outcomes.has(episode.dataset.outcome));
    // The two sides of a pair only mean something together.
    const whole = card.classList.contains("pair");
    for (const episode of episodes) episode.hidden = !whole && !wanted.includes(episode);
    const other = template && card.dataset.template !== template;
    card.hidden = !wanted.length || other || !texts.get(card).includes(words);
    shown += card.hidden ? 0 : 1;
  }
  form.querySelector("output").textContent = `${shown} of ${cards.length} tasks`;
}

function alike(event) {
  const step = event.target.closest(".group .step");
  for (const other of document.querySelectorAll(".alike")) other.classList.remove("alike");
  if (!step || !step.dataset.state) return;
  for (const other of step.closest(".card").querySelectorAll(".step")) {
    other.classList.toggle("alike", other.dataset.state === step.dataset.state);
  }
}

form.addEventListener("input", filter);
form.addEventListener("submit", (event) => event.preventDefault());
document.addEventListener("mouseover", alike);
form.hidden = cards.length === 0;
filter();
