-- wrk script: replays the request bodies of a file, one a line, in order, over all connections.
-- Argument after "--": FILE of bodies. Environment BENCH_RESULT: the file to write the result (JSON) to;
-- BENCH_ACCEPT: what the answers are to be, if that is to be said.

local bodies, position = {}, 0

function init(args)
  for line in io.lines(args[1]) do
    bodies[#bodies + 1] = line
  end
  wrk.method = "POST"
  wrk.headers["Content-Type"] = "application/json"
  local accept = os.getenv("BENCH_ACCEPT")
  if accept and accept ~= "" then
    wrk.headers["Accept"] = accept
  end
end

function request()
  position = position % #bodies + 1
  return wrk.format(nil, nil, nil, bodies[position])
end

function done(summary, latency, requests)
  local errors = summary.errors
  local out = io.open(os.getenv("BENCH_RESULT"), "w")
  out:write(string.format(
    '{"requests": %d, "seconds": %.6f, "p50_ms": %.4f, "p99_ms": %.4f, "errors": %d}\n',
    summary.requests, summary.duration / 1e6, latency:percentile(50) / 1e3, latency:percentile(99) / 1e3,
    errors.connect + errors.read + errors.write + errors.status + errors.timeout))
  out:close()
end
