//! One of the racing processes.

use std::io::BufRead;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use anyhow::Context;
use tessera_harness::{Rng, monotonic_ns};
use tessera_tenant_program::cuda::{Cuda, Stream};
use tessera_tenant_program::memory::{Api, Block};

use super::{failed, open, say};
use crate::race::CHUNK;

/// Does what the lines on its standard input say, and answers each.
///
/// - `round T APIS`: at `CLOCK_MONOTONIC` `T`, every thread that holds nothing asks for one chunk, by
///   the next of the APIs; answers how many this process holds then.
/// - `free`: gives all back.
/// - `churn MS APIS`: every thread takes and gives back a chunk as fast as it can, by an API drawn
///   again each time; answers how many of its requests were refused.
pub fn run(threads: usize) -> anyhow::Result<()> {
    let cuda = open()?;
    let held: Vec<Mutex<Option<Block>>> = (0..threads).map(|_| Mutex::new(None)).collect();
    say("ready")?;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let words: Vec<&str> = line.split(' ').collect();
        let answer = match words[..] {
            ["round", at, apis] => {
                let at: u64 = at.parse()?;
                let apis = parse(apis)?;
                let ask = |index, slot: &mut _| ask_at(&cuda, slot, apis[index % apis.len()], at);
                all(&held, ask)?.into_iter().sum()
            }
            ["free"] => all(&held, |_, slot| give_back(&cuda, slot))?.into_iter().sum(),
            ["churn", ms, apis] => {
                let end = Instant::now() + Duration::from_millis(ms.parse()?);
                let apis = parse(apis)?;
                let work = |index, slot: &mut _| churn(&cuda, slot, &apis, index as u64, end);
                all(&held, work)?.into_iter().sum::<u64>()
            }
            _ => anyhow::bail!("unknown order {line:?}"),
        };
        say(&answer.to_string())?;
    }
    Ok(())
}

fn parse(apis: &str) -> anyhow::Result<Vec<Api>> {
    Ok(apis.split(',').map(str::parse::<Api>).collect::<Result<_, _>>()?)
}

type Slot = Mutex<Option<Block>>;

/// Runs `work` for every slot on a thread of its own.
fn all(
    slots: &[Slot],
    work: impl Fn(usize, &mut Option<Block>) -> anyhow::Result<u64> + Sync,
) -> anyhow::Result<Vec<u64>> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = slots
            .iter()
            .enumerate()
            .map(|(index, slot)| {
                let work = &work;
                scope.spawn(move || {
                    work(index, &mut slot.lock().unwrap_or_else(std::sync::PoisonError::into_inner))
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?)
            .collect()
    })
}

fn ask(cuda: &Cuda, slot: &mut Option<Block>, api: Api) -> anyhow::Result<bool> {
    match cuda.allocate(api, CHUNK, Stream::LEGACY) {
        Ok(block) => {
            *slot = Some(block);
            Ok(true)
        }
        Err(error) if error.is_out_of_memory() => Ok(false),
        Err(error) => Err(failed(error)),
    }
}

fn ask_at(cuda: &Cuda, slot: &mut Option<Block>, api: Api, at: u64) -> anyhow::Result<u64> {
    cuda.bind().map_err(failed)?;
    let ahead = at.saturating_sub(monotonic_ns());
    // Asleep most of the way: with more threads than cores, spinning would make them late.
    std::thread::sleep(Duration::from_nanos(ahead.saturating_sub(200_000)));
    while monotonic_ns() < at {
        std::hint::spin_loop();
    }
    if slot.is_none() {
        ask(cuda, slot, api)?;
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

fn churn(
    cuda: &Cuda,
    slot: &mut Option<Block>,
    apis: &[Api],
    index: u64,
    end: Instant,
) -> anyhow::Result<u64> {
    cuda.bind().map_err(failed)?;
    let mut rng = Rng::with_seed(u64::from(std::process::id()) << 8 | index);
    let mut refused = 0;
    while Instant::now() < end {
        if slot.is_some() {
            give_back(cuda, slot)?;
        } else if !ask(cuda, slot, apis[rng.usize(..apis.len())]).context("while churning")? {
            refused += 1;
        }
    }
    give_back(cuda, slot)?;
    Ok(refused)
}
