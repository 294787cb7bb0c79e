//! What a child process of the bench does: the same code with and without the shim preloaded.

use std::io::{BufRead, Write};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use anyhow::Context;
use tessera_tenant::cuda::{Api, Block, Cuda, Stream};
use tessera_tenant::driver::Resolve;
use tessera_tenant::{Device, Target};

use crate::clock;
use crate::stats::Sample;

/// Calls timed together: long enough for the clock, short enough to fit between preemptions.
const BATCH: u32 = 64;
/// Batches whose median is one round's value.
const BATCHES: usize = 400;
/// Allocations are of this size.
pub const CHUNK: u64 = 2 << 20;

/// Does what the parent asked for, and prints the result.
///
/// # Errors
/// The driver's, or an unknown task.
pub fn main(task: &[String]) -> anyhow::Result<()> {
    let words: Vec<&str> = task.iter().map(String::as_str).collect();
    match words[..] {
        ["launch"] => launch(),
        ["alloc-free"] => alloc_free(),
        ["mem-get-info"] => mem_get_info(),
        ["first-call"] => first_call(),
        ["race", threads] => race(threads.parse()?),
        ["hold", bytes] => hold(bytes.parse()?),
        ["take", bytes] => take(bytes.parse()?),
        _ => anyhow::bail!("unknown task {task:?}"),
    }
}

fn open() -> anyhow::Result<Cuda> {
    let target = Target { resolve: Resolve::Dlsym, device: Device::Ordinal(0) };
    Cuda::open(target).map_err(|exit| anyhow::anyhow!(exit.message))
}

fn failed(error: tessera_tenant::exit::CudaError) -> anyhow::Error {
    anyhow::anyhow!("{} returned {}", error.call, error.code)
}

/// Times batches of `call` and prints the median, in nanoseconds a call. `between` is not timed.
fn measure(
    mut call: impl FnMut() -> anyhow::Result<()>,
    mut between: impl FnMut() -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let mut values = Vec::with_capacity(BATCHES);
    for batch in 0..BATCHES + BATCHES / 10 {
        let start = Instant::now();
        for _ in 0..BATCH {
            call()?;
        }
        let elapsed = start.elapsed();
        // The first ones warm caches and branch predictors.
        if batch >= BATCHES / 10 {
            values.push(elapsed.as_secs_f64() * 1e9 / f64::from(BATCH));
        }
        between()?;
    }
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

fn alloc_free() -> anyhow::Result<()> {
    let cuda = open()?;
    measure(
        || {
            let block = cuda.allocate(Api::Plain, CHUNK, Stream::LEGACY).map_err(failed)?;
            cuda.free(&block, Stream::LEGACY).map_err(failed)
        },
        || Ok(()),
    )
}

fn mem_get_info() -> anyhow::Result<()> {
    let cuda = open()?;
    measure(|| cuda.mem_info().map(|_| ()).map_err(failed), || Ok(()))
}

/// From nothing to a context: loading the driver, `cuInit`, the primary context. Microseconds.
fn first_call() -> anyhow::Result<()> {
    let start = Instant::now();
    let cuda = open()?;
    let elapsed = start.elapsed();
    println!("{}", elapsed.as_secs_f64() * 1e6);
    cuda.close().map_err(failed)
}

/// Holds `bytes` until killed.
fn hold(bytes: u64) -> anyhow::Result<()> {
    let cuda = open()?;
    let _block = cuda.allocate(Api::Plain, bytes, Stream::LEGACY).map_err(failed)?;
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
                Ok(block) => break (clock::now_ns(), block),
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

/// One of the racing processes: does what the lines on its standard input say, and answers each.
///
/// - `round T`: at `CLOCK_MONOTONIC` `T`, every thread that holds nothing asks for one chunk;
///   answers how many this process holds then.
/// - `free`: gives all back.
/// - `churn MS`: every thread takes and gives back a chunk as fast as it can; answers how many of
///   its requests were refused.
fn race(threads: usize) -> anyhow::Result<()> {
    let cuda = open()?;
    let held: Vec<Mutex<Option<Block>>> = (0..threads).map(|_| Mutex::new(None)).collect();
    say("ready")?;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let words: Vec<&str> = line.split(' ').collect();
        let answer = match words[..] {
            ["round", at] => {
                let at: u64 = at.parse()?;
                all(&held, |slot| ask_at(&cuda, slot, at))?.into_iter().sum()
            }
            ["free"] => all(&held, |slot| give_back(&cuda, slot))?.into_iter().sum(),
            ["churn", ms] => {
                let end = Instant::now() + Duration::from_millis(ms.parse()?);
                all(&held, |slot| churn(&cuda, slot, end))?.into_iter().sum::<u64>()
            }
            _ => anyhow::bail!("unknown order {line:?}"),
        };
        say(&answer.to_string())?;
    }
    Ok(())
}

fn say(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{text}")?;
    Ok(out.flush()?)
}

type Slot = Mutex<Option<Block>>;

/// Runs `work` for every slot on a thread of its own.
fn all(
    slots: &[Slot],
    work: impl Fn(&mut Option<Block>) -> anyhow::Result<u64> + Sync,
) -> anyhow::Result<Vec<u64>> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = slots
            .iter()
            .map(|slot| {
                let work = &work;
                scope.spawn(move || {
                    work(&mut slot.lock().unwrap_or_else(std::sync::PoisonError::into_inner))
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?)
            .collect()
    })
}

fn ask(cuda: &Cuda, slot: &mut Option<Block>) -> anyhow::Result<bool> {
    match cuda.allocate(Api::Plain, CHUNK, Stream::LEGACY) {
        Ok(block) => {
            *slot = Some(block);
            Ok(true)
        }
        Err(error) if error.is_out_of_memory() => Ok(false),
        Err(error) => Err(failed(error)),
    }
}

fn ask_at(cuda: &Cuda, slot: &mut Option<Block>, at: u64) -> anyhow::Result<u64> {
    cuda.bind().map_err(failed)?;
    let ahead = at.saturating_sub(clock::now_ns());
    // Asleep most of the way: with more threads than cores, spinning would make them late.
    std::thread::sleep(Duration::from_nanos(ahead.saturating_sub(200_000)));
    while clock::now_ns() < at {
        std::hint::spin_loop();
    }
    if slot.is_none() {
        ask(cuda, slot)?;
    }
    Ok(u64::from(slot.is_some()))
}

fn give_back(cuda: &Cuda, slot: &mut Option<Block>) -> anyhow::Result<u64> {
    cuda.bind().map_err(failed)?;
    if let Some(block) = slot.take() {
        cuda.free(&block, Stream::LEGACY).map_err(failed)?;
    }
    Ok(0)
}

fn churn(cuda: &Cuda, slot: &mut Option<Block>, end: Instant) -> anyhow::Result<u64> {
    cuda.bind().map_err(failed)?;
    let mut refused = 0;
    while Instant::now() < end {
        if slot.is_some() {
            give_back(cuda, slot)?;
        } else if !ask(cuda, slot).context("while churning")? {
            refused += 1;
        }
    }
    give_back(cuda, slot)?;
    Ok(refused)
}
