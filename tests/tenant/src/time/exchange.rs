//! Two processes whose steps wait for one another: each works, writes a word, and goes on when the
//! other's is there, as ranks of a collective do. The words are in memory that both have pinned.
//!
//! With one GPU neither gets far alone: a gate that lets only one of them launch must find that out.
//! Steps so far are in the page ([`DONE`]), so that they can be read of processes that hang.

use std::sync::atomic::Ordering;
use std::time::Duration;

use clap::ValueEnum;
use serde_json::json;
use tessera_cuda::types::CUdeviceptr;

use super::kernel::{Amount, Kernels};
use super::page::{SharedPage, Words};
use super::talk::{self, Window};
use super::turns::{Log, done_at};
use crate::Device;
use crate::cuda::{Cuda, Event, Stream};
use crate::driver::call;
use crate::exit::{CudaError, Exit};
use crate::report;

/// Words of the page, each in a cache line of its own but the second: by rank, what the other waits for; by
/// rank, the last step whose kernel gave up; by rank, how many steps are done; whether rank 1 is there; whether it
/// may begin; the last step.
const WORD: [usize; 2] = [0, 8];
const GAVE_UP: [usize; 2] = [2, 10];
const DONE: [usize; 2] = [16, 24];
const READY: usize = 32;
const GO: usize = 40;
const LAST: usize = 48;
/// Steps between two waits of the host.
const BATCH: u64 = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Way {
    /// By `cuStreamWriteValue64` and `cuStreamWaitValue64`.
    Stream,
    /// By a kernel that writes and spins, as NCCL's do.
    Kernel,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Ranks {
    /// This one is 0 and forks 1.
    Both,
    #[value(name = "0")]
    Zero,
    #[value(name = "1")]
    One,
}

#[derive(clap::Args, Debug)]
pub struct Options {
    #[arg(long)]
    rank: Ranks,
    #[arg(long, default_value = "stream")]
    way: Way,
    /// The file that both map
    #[arg(long)]
    page: String,
    #[arg(long, default_value_t = 50.0)]
    work_us: f64,
}

/// Runs a rank, or forks and runs both.
pub(super) fn run(device: Device, options: &Options, rounds_per_us: f64) -> Result<(), Exit> {
    let mut child = None;
    let rank = match options.rank {
        Ranks::Zero => 0,
        Ranks::One => 1,
        // SAFETY: no thread was started and no driver loaded yet: the child is a full process.
        Ranks::Both => match unsafe { libc::fork() } {
            -1 => return Err(Exit::new(71, format!("fork: {}", std::io::Error::last_os_error()))),
            0 => {
                // SAFETY: plain numbers: the child ends with its parent.
                unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
                1
            }
            pid => {
                child = Some(pid);
                0
            }
        },
    };
    let page = SharedPage::open(&options.page)?;
    let cuda = Cuda::open(device)?;
    let kernels = Kernels::load(cuda)?;
    let peer = Rank {
        kernels,
        stream: cuda.stream()?,
        event: Event::new(cuda)?,
        words: page.register(cuda)?,
        amount: Amount::micros(options.work_us, rounds_per_us),
        way: options.way,
        rank,
    };
    // Loads the kernel.
    kernels.launch(peer.amount, 0, peer.stream)?;
    cuda.synchronise(peer.stream)?;
    if rank == 0 { lead(&peer, child) } else { follow(&peer) }
}

struct Rank {
    kernels: Kernels,
    stream: Stream,
    event: Event,
    words: Words,
    amount: Amount,
    way: Way,
    rank: usize,
}

/// Says when both are there, and measures once.
fn lead(rank: &Rank, child: Option<i32>) -> Result<(), Exit> {
    let page = rank.words.host;
    page[LAST].store(u64::MAX, Ordering::Release);
    while page[READY].load(Ordering::Acquire) == 0 {
        // SAFETY: a child of this process, or nobody; no status is wanted.
        let ended = child.is_some_and(
            |pid| unsafe { libc::waitpid(pid, std::ptr::null_mut(), libc::WNOHANG) } == pid,
        );
        if ended {
            return Err(Exit::new(70, "the other rank ended before it was ready"));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    report::line("ready", json!({}));
    let Some(request) = talk::next() else {
        page[LAST].store(0, Ordering::Release);
        page[GO].store(1, Ordering::Release);
        return Ok(());
    };
    let window = Window::of(&request);
    page[GO].store(1, Ordering::Release);
    let log = rank.steps(|done| {
        if window.is_over() && page[LAST].load(Ordering::Acquire) == u64::MAX {
            // The other may have begun the next batch, but not the one after: that waits for this rank.
            page[LAST].store(done + 2 * BATCH, Ordering::Release);
        }
    })?;
    let steps = done_at(&log, window.end_ns) - done_at(&log, window.begin_ns);
    let gave_up = GAVE_UP.iter().map(|&word| page[word].load(Ordering::Acquire)).max();
    report::line(
        "measured",
        json!({ "steps": steps, "seconds": window.seconds(), "gave_up_at": gave_up.unwrap_or(0) }),
    );
    Ok(())
}

fn follow(rank: &Rank) -> Result<(), Exit> {
    let page = rank.words.host;
    page[READY].store(1, Ordering::Release);
    while page[GO].load(Ordering::Acquire) == 0 {
        std::thread::sleep(Duration::from_micros(100));
    }
    rank.steps(|_| {})?;
    Ok(())
}

impl Rank {
    /// Steps up to the last; `look` is called before each batch.
    fn steps(&self, mut look: impl FnMut(u64)) -> Result<Log, CudaError> {
        let page = self.words.host;
        let (mut log, mut done) = (vec![(talk::now_ns(), 0)], 0);
        loop {
            look(done);
            if done >= page[LAST].load(Ordering::Acquire) {
                return Ok(log);
            }
            (done + 1..=done + BATCH).try_for_each(|step| self.step(step))?;
            self.event.record(self.stream)?;
            self.event.wait()?;
            done += BATCH;
            page[DONE[self.rank]].store(done, Ordering::Release);
            log.push((talk::now_ns(), done));
        }
    }

    fn step(&self, step: u64) -> Result<(), CudaError> {
        self.kernels.launch(self.amount, 0, self.stream)?;
        let [mine, peer]: [CUdeviceptr; 2] =
            [self.words.at(WORD[self.rank]), self.words.at(WORD[1 - self.rank])];
        if self.way == Way::Kernel {
            return self.kernels.exchange([mine, peer], step, self.stream);
        }
        let driver = self.kernels.cuda.driver;
        // SAFETY: aligned words of pinned memory, which stays mapped; 0: until it is as large or larger.
        unsafe {
            call!(driver, write_value(self.stream.0, mine, step, 0))?;
            call!(driver, wait_value(self.stream.0, peer, step, 0))
        }
    }
}
