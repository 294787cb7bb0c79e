//! The shim in processes on the simulated driver.

/// The shim's table against NVIDIA's headers and NVIDIA's own libcuda.
mod api {
    mod arguments;
    mod coverage;
    mod real_libcuda;
}
mod clients;
/// A tenant at its gate, under an arbiter that the test scripts.
mod gate {
    mod ahead;
    mod costs;
    mod failing;
    mod turns;
    mod work;
}
/// The shim beside what else is in a process, and in a container.
mod host {
    mod closed;
    mod guest;
    mod second_preload;
}
/// The memory quota over every way to obtain memory.
mod memory {
    mod calls;
    mod graph_memory;
    mod limits;
    mod mig;
    mod overhead;
    mod pools;
    mod vmm;
}
/// Processes that start, fork and end, well or badly.
mod processes {
    mod lifecycle;
    mod several_shares;
}

use std::time::{Duration, Instant};

use tessera_harness::{Conversation, PATIENCE, Pages, Preloaded, SimGpu, artefacts, compile_c};

const SUCCESS: i64 = 0;
const OUT_OF_MEMORY: i64 = 2;

/// The default machine, and a page that gives so many bytes of its first GPU.
fn quota(bytes: u64) -> (SimGpu, Pages) {
    let sim = SimGpu::start_default();
    let pages = Pages::create(&[(sim.uuid(0), bytes)]);
    (sim, pages)
}

/// The default machine, and a page that gives so many bytes of each of its GPUs.
fn both(first: u64, second: u64) -> (SimGpu, Pages) {
    let sim = SimGpu::start_default();
    let pages = Pages::create(&[(sim.uuid(0), first), (sim.uuid(1), second)]);
    (sim, pages)
}

/// `tests/programs/<name>.c` with a context under such a quota.
fn held(name: &str, bytes: u64) -> (SimGpu, Pages, Conversation) {
    let (sim, pages) = quota(bytes);
    let tenant = Conversation::with_context(name, &sim, &pages);
    (sim, pages, tenant)
}

/// `tests/programs/<name>.c` with a context under `tessera run` with these options, which observes as the plugin does:
/// 600 MiB of which a context takes 64.
fn observed(name: &str, sim: &SimGpu, options: &[&str]) -> Conversation {
    let run = Preloaded::bare(artefacts().tessera()).sim(sim).arg("run").args(options);
    let run = run.args(["--memory", "600Mi", "--context-overhead", "64Mi", "--shim"]);
    ready(run.arg(artefacts().shim()).arg("--").arg(compile_c(name)))
}

/// Asks NVML for free memory, which takes no context, until it is `bytes`.
fn until_free(tenant: &mut Conversation, bytes: u64) {
    let mut free = 0;
    let begin = Instant::now();
    while free != bytes {
        free = tenant.ask("nvml 0").values[1];
        assert!(begin.elapsed() < PATIENCE, "{free} bytes free, not {bytes}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A program with a context on its first GPU.
fn ready(program: Preloaded) -> Conversation {
    let mut program = Conversation::start(program);
    program.must("init");
    program.must("retain 0");
    program
}
