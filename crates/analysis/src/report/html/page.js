"use strict";
// A click on a head sorts its table, a click on a number copies it, a click on a shape or a word says what it would
// say under a pointer, and a button switches light and dark. A table that is wider than its box says so.
// Without this script the page still shows everything.

const root = document.documentElement;
const said = document.getElementById("said");

document.getElementById("face").addEventListener("click", () => {
  const isDark = root.dataset.face
    ? root.dataset.face === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.face = isDark ? "light" : "dark";
});

const valueOf = (cell) => {
  if (cell.dataset.v === undefined) return cell.textContent;
  return cell.dataset.v === "" ? null : Number(cell.dataset.v);
};

// Cells without a value come last, whichever way the others are sorted.
const compare = (a, b, sign) => {
  if (a === null || b === null) return (a === null) - (b === null);
  if (typeof a === "number" && typeof b === "number") return sign * (a - b);
  return sign * String(a).localeCompare(String(b), undefined, { numeric: true });
};

const sort = (head) => {
  const heads = [...head.parentElement.children];
  const at = heads.indexOf(head);
  // The first click puts the largest number first, and text in alphabetical order.
  const first = head.classList.contains("num") ? "descending" : "ascending";
  const other = first === "descending" ? "ascending" : "descending";
  const order = head.getAttribute("aria-sort") === first ? other : first;
  for (const each of heads) each.setAttribute("aria-sort", each === head ? order : "none");
  const body = head.closest("table").tBodies[0];
  const sign = order === "ascending" ? 1 : -1;
  const rows = [...body.rows].map((row) => [valueOf(row.cells[at]), row]);
  rows.sort((a, b) => compare(a[0], b[0], sign));
  body.append(...rows.map(([, row]) => row));
};

let hush;
const say = (words) => {
  said.textContent = words;
  said.classList.add("on");
  clearTimeout(hush);
  // A long text takes longer to read.
  hush = setTimeout(() => said.classList.remove("on"), 1600 + 50 * words.length);
};

const copy = async (text) => {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // A page that was opened from a disk may have no clipboard. A selection can be copied everywhere.
    const field = document.createElement("textarea");
    field.value = text;
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
  say(`Copied ${text}`);
};

document.addEventListener("click", (event) => {
  const head = event.target.closest("th");
  if (head) {
    sort(head);
    // A finger cannot hover.
    if (event.pointerType === "touch") say(head.title);
    return;
  }
  const number = event.target.closest(".n[data-v]");
  if (number && number.dataset.v !== "" && getSelection().isCollapsed) return copy(number.dataset.v);
  const shape = event.target.closest("svg g");
  if (shape) return say(shape.querySelector("title").textContent);
  const titled = event.target.closest("td[title], .figures [title]");
  if (titled) say(titled.title);
});

// Shows on which sides there is more of a table than its box can show.
const hint = (scroll) => {
  const rest = scroll.scrollWidth - scroll.clientWidth;
  const { parentElement: wide, scrollLeft } = scroll;
  wide.previousElementSibling.hidden = rest <= 1;
  wide.classList.toggle("before", rest > 1 && scrollLeft > 1);
  wide.classList.toggle("after", rest > 1 && scrollLeft < rest - 1);
};
const boxes = new ResizeObserver((entries) => entries.forEach(({ target }) => hint(target)));
for (const scroll of document.querySelectorAll(".scroll")) {
  hint(scroll);
  boxes.observe(scroll);
  scroll.addEventListener("scroll", () => hint(scroll), { passive: true });
}
