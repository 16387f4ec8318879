// The steps of a run as arrays. A column that is the same everywhere comes as one number.

const STEP = "global_step";
const PASS_AT_1 = "validation.pass_at.1";

function decodeTable(encoded) {
  if (encoded === null) return null;
  const columns = {};
  for (const [name, column] of Object.entries(encoded)) columns[name] = decodeColumn(column);
  return columns;
}

function decodeColumn(column) {
  if ("constant" in column) return new Float64Array(column.length).fill(column.constant);
  const text = atob(column.base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return column.bytes === 8 ? new Float64Array(bytes.buffer) : new Float32Array(bytes.buffer);
}

// Return a run with its tables decoded. `table` has steps as they were recorded; `means` has means
// of stretches if the table leaves out steps.
function decodeRun(run) {
  const table = decodeTable(run.table);
  for (const columns of [table, run.means = decodeTable(run.means)])
    if (columns && run.flopsPerToken && columns.tokens_seen)
      columns.flops = Float64Array.from(columns.tokens_seen, (tokens) => tokens * run.flopsPerToken);
  run.table = table;
  return run;
}

const X_COLUMNS = { step: STEP, tokens: "tokens_seen", flops: "flops", seconds: "seconds" };
