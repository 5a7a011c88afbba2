-- wrk script: replays the request bodies of a file, one a line, in order, over all connections.
-- Arguments after "--": FILE of bodies, FILE for the result (JSON).

local bodies, position, result_file = {}, 0, nil

function init(args)
  for line in io.lines(args[1]) do
    bodies[#bodies + 1] = line
  end
  wrk.method = "POST"
  wrk.headers["Content-Type"] = "application/json"
end

function setup(thread)
  -- One thread makes the order of the bodies the same in every run.
  thread:set("only_thread", true)
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
