// The points of a metric of a run: exact ones, and smoothed ones.

// Return points {x, y} without those that have no value, `rows` being their rows in the table.
function exactCurve(run, metric, xName, logX) {
  return points(run.table, metric, xName, logX);
}

// Return running means over `percent` of the run's steps, from means of stretches if there are any;
// null if so few points need no smoothing.
function smoothCurve(run, metric, xName, logX, percent) {
  if (metric === "learning_rate") return null;
  const curve = points(run.means ?? run.table, metric, xName, logX);
  const reach = Math.round((curve.y.length * percent) / 200);
  return reach < 2 ? null : { ...curve, y: runningMeans(curve.y, reach) };
}

function points(table, metric, xName, logX) {
  const xs = table[X_COLUMNS[xName]];
  const ys = table[metric];
  const found = { x: [], y: [], rows: [] };
  if (!xs || !ys) return found;
  for (let row = 0; row < ys.length; row++) {
    if (Number.isNaN(ys[row]) || Number.isNaN(xs[row]) || (logX && xs[row] <= 0)) continue;
    found.x.push(xs[row]);
    found.y.push(ys[row]);
    found.rows.push(row);
  }
  return found;
}

function runningMeans(values, reach) {
  const sums = new Float64Array(values.length + 1);
  for (let i = 0; i < values.length; i++) sums[i + 1] = sums[i] + values[i];
  return values.map((_, i) => {
    const from = Math.max(0, i - reach);
    const to = Math.min(values.length, i + reach + 1);
    return (sums[to] - sums[from]) / (to - from);
  });
}

// Return the first place in a sorted list whose value is not below `value`.
function placeOf(sorted, value) {
  let low = 0;
  let high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

function nearestPlace(sorted, value) {
  if (!sorted.length) return -1;
  const after = Math.min(placeOf(sorted, value), sorted.length - 1);
  const before = Math.max(after - 1, 0);
  return value - sorted[before] <= sorted[after] - value ? before : after;
}
