//! What a child process of the bench does: the same code with and without the shim preloaded.

mod race;
mod sessions;

use std::io::Write;
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use tessera_harness::monotonic_ns;
use tessera_tenant_program::Device;
use tessera_tenant_program::cuda::{Cuda, Stream};
use tessera_tenant_program::memory::Api;

use crate::stats::Sample;

/// Calls timed together: long enough for the clock, short enough to fit between preemptions.
const BATCH: u32 = 64;
/// Batches whose median is one round's value: as many as a round has time for, within these bounds.
const BATCHES: RangeInclusive<usize> = 400..=4000;
const ROUND: Duration = Duration::from_millis(80);
/// Batches before those, at least; up to ten times as many while they take no more than a tenth of the
/// round.
const WARM_UP: usize = 40;
/// Allocations are of this size.
pub const CHUNK: u64 = 2 << 20;

/// Does what the parent asked for, and prints the result.
pub fn main(task: &[String]) -> anyhow::Result<()> {
    let words: Vec<&str> = task.iter().map(String::as_str).collect();
    match words[..] {
        ["launch"] => launch(),
        ["launch-each"] => launch_each(),
        ["alloc-free"] => alloc_free(Api::Plain),
        ["alloc-async"] => alloc_async(),
        ["array"] => alloc_free(Api::Array),
        ["mem-get-info"] => mem_get_info(),
        ["offload"] => offload(),
        ["race", threads] => race::run(threads.parse()?),
        ["hold", api, bytes] => hold(api.parse()?, bytes.parse()?),
        ["take", bytes] => take(bytes.parse()?),
        ["sessions"] => sessions::run(),
        _ => anyhow::bail!("unknown task {task:?}"),
    }
}

fn open() -> anyhow::Result<Cuda> {
    Cuda::open(Device::Ordinal(0)).map_err(|exit| anyhow::anyhow!(exit.message))
}

fn failed(error: tessera_tenant_program::exit::CudaError) -> anyhow::Error {
    anyhow::anyhow!("{} returned {}", error.call, error.code)
}

/// Batches for a round, after `batches` that took `took`.
fn batches_for(batches: usize, took: Duration) -> usize {
    let each = (took.as_nanos() / batches.max(1) as u128).max(1);
    let fitting = usize::try_from(ROUND.as_nanos() / each).unwrap_or(usize::MAX);
    fitting.clamp(*BATCHES.start(), *BATCHES.end())
}

/// Times batches of `call` and prints the median, in nanoseconds a call. `between` is not timed.
fn measure(
    mut call: impl FnMut() -> anyhow::Result<()>,
    mut between: impl FnMut() -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let mut batch = || -> anyhow::Result<f64> {
        let start = Instant::now();
        for _ in 0..BATCH {
            call()?;
        }
        let elapsed = start.elapsed();
        between()?;
        Ok(elapsed.as_secs_f64() * 1e9 / f64::from(BATCH))
    };
    // The first ones warm caches and branch predictors.
    let (start, mut warm) = (Instant::now(), 0);
    while warm < WARM_UP || (warm < WARM_UP * 10 && start.elapsed() < ROUND / 10) {
        batch()?;
        warm += 1;
    }
    let values: anyhow::Result<Vec<f64>> =
        (0..batches_for(warm, start.elapsed())).map(|_| batch()).collect();
    let values = values?;
    println!("{}", Sample::new(values).median());
    Ok(())
}

fn launch() -> anyhow::Result<()> {
    let cuda = open()?;
    let kernel = cuda.kernel().map_err(failed)?;
    let stream = cuda.stream().map_err(failed)?;
    measure(
        || cuda.launch(&kernel, 0, stream).map_err(failed),
        || cuda.wait(&kernel, stream).map_err(failed),
    )
}

fn launch_each() -> anyhow::Result<()> {
    let cuda = open()?;
    let kernel = cuda.kernel().map_err(failed)?;
    let stream = cuda.stream().map_err(failed)?;
    crate::compute::launch_each(
        || cuda.launch(&kernel, 0, stream).map_err(failed),
        || cuda.wait(&kernel, stream).map_err(failed),
    )
}

fn alloc_free(api: Api) -> anyhow::Result<()> {
    let cuda = open()?;
    measure(
        || {
            let block = cuda.allocate(api, CHUNK, Stream::LEGACY).map_err(failed)?;
            cuda.free(&block, Stream::LEGACY).map_err(failed)
        },
        || Ok(()),
    )
}

/// In a pool that has its chunk, and keeps it because something lives in it.
fn alloc_async() -> anyhow::Result<()> {
    let cuda = open()?;
    let stream = cuda.stream().map_err(failed)?;
    let _keeps_the_pool_warm = cuda.allocate(Api::Async, 1, stream).map_err(failed)?;
    let size = usize::try_from(CHUNK)?;
    measure(
        || cuda.async_pair(size, stream).map_err(failed),
        || cuda.synchronise(stream).map_err(failed),
    )
}

fn mem_get_info() -> anyhow::Result<()> {
    let cuda = open()?;
    measure(|| cuda.mem_info().map(|_| ()).map_err(failed), || Ok(()))
}

/// A call that copies 8,192 pieces to the device, as vLLM sends 4,096 to 12,288 (vllm-project/vllm#38460). Microseconds.
fn offload() -> anyhow::Result<()> {
    const COPIES: usize = 8192;
    const CALLS: usize = 40;
    let cuda = open()?;
    let stream = cuda.stream().map_err(failed)?;
    let mut pieces = cuda.offload(COPIES).map_err(failed)?;
    let mut call = || -> anyhow::Result<f64> {
        let start = Instant::now();
        cuda.copy_batch(&mut pieces, stream).map_err(failed)?;
        let elapsed = start.elapsed();
        cuda.synchronise(stream).map_err(failed)?;
        Ok(elapsed.as_secs_f64() * 1e6)
    };
    call()?;
    let values: anyhow::Result<Vec<f64>> = (0..CALLS).map(|_| call()).collect();
    println!("{}", Sample::new(values?).median());
    Ok(())
}

/// Holds `bytes` until killed.
fn hold(api: Api, bytes: u64) -> anyhow::Result<()> {
    let cuda = open()?;
    let _block = cuda.allocate(api, bytes, Stream::LEGACY).map_err(failed)?;
    println!("holding");
    std::thread::sleep(Duration::from_secs(60));
    Ok(())
}

/// At a line on standard input, asks for `bytes` again and again until it gets them; prints when,
/// by `CLOCK_MONOTONIC`, and frees them.
fn take(bytes: u64) -> anyhow::Result<()> {
    let cuda = open()?;
    println!("ready");
    let mut line = String::new();
    while std::io::stdin().read_line(&mut line)? > 0 {
        let deadline = Instant::now() + Duration::from_secs(10);
        let (at, block) = loop {
            match cuda.allocate(Api::Plain, bytes, Stream::LEGACY) {
                Ok(block) => break (monotonic_ns(), block),
                Err(error) if error.is_out_of_memory() => {}
                Err(error) => return Err(failed(error)),
            }
            anyhow::ensure!(Instant::now() < deadline, "the bytes did not come back in 10 s");
            std::thread::sleep(Duration::from_micros(50));
        };
        cuda.free(&block, Stream::LEGACY).map_err(failed)?;
        println!("{at}");
    }
    Ok(())
}

fn say(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{text}")?;
    Ok(out.flush()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_calls_get_fewer_batches_and_never_too_few() {
        let each = |us: u64| batches_for(40, Duration::from_micros(us * 40));
        assert_eq!((each(1), each(20), each(100), each(5000)), (4000, 4000, 800, 400));
        assert_eq!(batches_for(40, Duration::ZERO), 4000);
    }
}
