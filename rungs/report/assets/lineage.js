// Which run was copied from which (`--like`), and what was changed.

function drawLineage() {
  const withParents = state.runs.filter((run) => run.lineage);
  byId("lineage").hidden = !withParents.length;
  const shown = new Map(state.runs.map((run) => [run.path, run]));
  const children = new Map();
  for (const run of withParents) {
    const parent = run.lineage.like;
    children.set(parent, [...(children.get(parent) ?? []), run]);
  }
  const paths = [...new Set([...children.keys(), ...shown.keys()])];
  const roots = paths.filter((path) => !shown.get(path)?.lineage && children.has(path));
  const list = element("ul", {}, ...roots.map((path) => lineageOf(path, shown, children, [])));
  byId("lineage-tree").replaceChildren(list);
}

function lineageOf(path, shown, children, above) {
  const run = shown.get(path);
  const entry = element("li", {}, element("strong", {}, run ? run.name : path));
  if (!run) entry.append(" (not shown)");
  if (run?.lineage) entry.append(` ${changesOf(run.lineage)}`);
  const below = above.includes(path) ? [] : children.get(path) ?? [];
  if (below.length)
    entry.append(element("ul", {},
      ...below.map((child) => lineageOf(child.path, shown, children, [...above, path]))));
  return entry;
}

function changesOf(lineage) {
  const changes = Object.entries(lineage.set).map(([key, value]) => `${key} = ${text(value)}`);
  if (lineage.from_step != null) changes.unshift(`from step ${lineage.from_step}`);
  return changes.length ? changes.join(", ") : "(no key changed)";
}
