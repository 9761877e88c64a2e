"use strict";
// Fetches this page again and replaces the parts that changed.
const PERIOD_MS = 2000, LIMIT_MS = 8000, SILENT_MS = 6000;
const silent = document.getElementById("silent");
let answered = Date.now();

async function refresh() {
  try {
    const answer = await fetch(location.pathname, { cache: "no-store", signal: AbortSignal.timeout(LIMIT_MS) });
    // With 503, the page of a coordinator that stands still.
    if (!answer.headers.get("content-type").startsWith("text/html")) throw new Error(answer.statusText);
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    for (const part of document.querySelectorAll("[data-live]")) {
      const next = fresh.getElementById(part.id);
      if (next && next.innerHTML !== part.innerHTML) part.replaceChildren(...next.childNodes);
    }
    document.title = fresh.title;
    answered = Date.now();
  } catch {
    // Reported below, once it lasts.
  }
  const seconds = Math.round((Date.now() - answered) / 1000);
  silent.hidden = Date.now() - answered < SILENT_MS;
  silent.textContent = `The coordinator has not answered for ${seconds} s. This is what it said last.`;
}

async function keepLooking() {
  if (!document.hidden) await refresh();
  setTimeout(keepLooking, PERIOD_MS);
}

document.addEventListener("visibilitychange", () => document.hidden || refresh());
setTimeout(keepLooking, PERIOD_MS);
