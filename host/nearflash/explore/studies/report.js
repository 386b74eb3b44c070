"use strict";
// Each study: axes of values, names of systems, and for every combination of the axes a value or null for each system.
// The last axis varies fastest. The state of a study can be set by the address: #kvnand=0,1,5,1&instinfer=3,2.
const studies = JSON.parse(document.getElementById("studies").textContent);

function control(axis, chosen) {
  const input = document.createElement(axis.numbers ? "input" : "select");
  if (axis.numbers) {
    Object.assign(input, { type: "range", min: 0, max: axis.values.length - 1, step: 1 });
  } else {
    axis.values.forEach((text, at) => input.add(new Option(text, at)));
  }
  input.value = chosen;
  return input;
}

function row(name, value, most, best, unit) {
  const line = document.createElement("tr");
  const [label, number, track] = [0, 1, 2].map(() => line.insertCell());
  label.textContent = name;
  number.className = "number";
  number.textContent = value === null ? "does not fit" : `${Number(value.toPrecision(4))} ${unit}`;
  track.className = "track";
  if (value !== null) {
    const bar = track.appendChild(document.createElement("div"));
    bar.className = "bar";
    bar.style.width = `${(100 * value) / most}%`;
  }
  line.className = value === best ? "best" : "";
  return line;
}

function show(study, at, body) {
  const cell = study.cells[at.reduce((before, index, axis) => before * study.axes[axis].values.length + index, 0)];
  const known = cell.filter((value) => value !== null);
  const best = study.lowest ? Math.min(...known) : Math.max(...known);
  body.replaceChildren(...cell.map((value, index) => [study.names[index], value])
    .filter(([name, value]) => value !== null || !study.hidden.includes(name))
    .map(([name, value]) => row(name, value, Math.max(...known), best, study.unit)));
}

function build(name, study, state) {
  const place = document.getElementById(`explore-${name}`);
  const at = study.axes.map((axis, index) => Math.min(Number(state?.[index] ?? axis.start), axis.values.length - 1));
  const body = document.createElement("table").createTBody();
  study.axes.forEach((axis, index) => {
    const label = place.appendChild(document.createElement("label"));
    const output = document.createElement("output");
    const input = control(axis, at[index]);
    const update = () => {
      at[index] = Number(input.value);
      output.textContent = axis.numbers ? axis.values[at[index]].toLocaleString("en") : "";
      show(study, at, body);
    };
    input.addEventListener("input", update);
    label.append(`${axis.name} `, input, " ", output);
    update();
  });
  place.appendChild(body.parentElement);
}

const states = new URLSearchParams(location.hash.slice(1));
for (const [name, study] of Object.entries(studies)) build(name, study, states.get(name)?.split(","));
