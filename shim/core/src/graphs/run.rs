//! Uploads and launches of graphs with allocation nodes.

use super::Needs;
use crate::gate::Stream;
use crate::pools::pool::Pool;
use crate::quota::{self, Asked};
use crate::real;
use crate::state::Process;
use crate::thread::{Answer, Call, answer};
use core::array;
use tessera_cuda::types::*;
use tessera_region::account::{Reason, Reservation};
use tessera_region::layout::MAX_GPUS;

/// A call that may take the memory of a graph.
pub(crate) struct Run<'a> {
    /// The driver's function, for messages.
    pub(crate) name: &'static str,
    pub(crate) process: &'static Process,
    pub(crate) needs: &'a Needs,
    /// Its memory has been mapped before, and nothing was trimmed since.
    pub(crate) is_mapped: bool,
}

/// Reservations by GPU.
type Reserved = [Option<Reservation<'static>>; MAX_GPUS];

/// Why a run cannot be.
enum Lack {
    /// The quota has not so many bytes of a GPU.
    Quota { gpu: u8, bytes: u64, reason: Reason },
    /// The driver's own answer.
    Driver(CUresult),
}

impl Run<'_> {
    /// Makes `call`; `upload` is the part of it that maps the graph's memory and nothing else.
    pub(crate) fn carry_out(&self, upload: Call<'_>, call: Call<'_>) -> Answer {
        self.at_once(call).unwrap_or_else(|| self.squeeze_in(upload, call))
    }

    /// Makes `call` if there is room for the worst, or never.
    pub(crate) fn at_once(&self, call: Call<'_>) -> Option<Answer> {
        if self.needs.unlisted > 0 {
            let unlisted = Asked::Bytes(self.needs.unlisted);
            return Some(Err(quota::refuse_unlisted(self.process, self.name, unlisted)));
        }
        let reserved = self.reserve_if_room()?;
        Some(self.settled(reserved, call))
    }

    fn pools(&self) -> impl Iterator<Item = (u8, u64, &'static Pool)> {
        let process = self.process;
        self.needs.each().filter_map(move |(gpu, bytes)| {
            let device = process.gpus.device_of(gpu)?;
            Some((gpu, bytes, process.pools.graphs(gpu, device)))
        })
    }

    /// The worst on every GPU, if there is room.
    fn reserve_if_room(&self) -> Option<Reserved> {
        let mut reserved: Reserved = [const { None }; MAX_GPUS];
        for (gpu, bytes, pool) in self.pools() {
            if pool.in_debt() {
                return None;
            }
            let here = quota::reserve_if_room(self.process, gpu, pool.worst(bytes))?;
            reserved[usize::from(gpu)] = Some(here);
        }
        Some(reserved)
    }

    /// `call` between announcement and settlement. What the driver takes beyond the reservations
    /// leaves its pool in debt: a launch cannot be undone.
    fn settled(&self, mut reserved: Reserved, call: Call<'_>) -> Answer {
        let mut worst = [0; MAX_GPUS];
        for (gpu, bytes, pool) in self.pools() {
            if let Some(here) = &reserved[usize::from(gpu)] {
                pool.begin(here.bytes());
                worst[usize::from(gpu)] = pool.worst(bytes);
            }
        }
        let (first, bytes) = self.needs.each().next().unwrap_or((0, 0));
        let answer = quota::insist(self.process, first, bytes, call);
        for (gpu, _, pool) in self.pools() {
            let at = usize::from(gpu);
            match reserved[at].take() {
                Some(here) => {
                    let lacking = pool.settle_call(self.process, here);
                    if lacking > 0 {
                        pool.learn(worst[at], lacking);
                        // Nobody to refuse any more.
                        pool.owe(self.process);
                    }
                }
                None => pool.owe(self.process),
            }
        }
        answer
    }

    /// Where the worst does not fit: the graph is uploaded first, which maps its memory and can be
    /// undone by a trim, and is launched only if what the driver took is paid. One that is mapped
    /// takes nothing more, unless it moves to another stream. Otherwise everything unused is trimmed,
    /// and what the nodes ask for is reserved.
    ///
    /// Nobody else trims between the upload and the end of the launch: what was mapped and paid would
    /// be unmapped, and mapped again unpaid.
    #[cold]
    fn squeeze_in(&self, upload: Call<'_>, call: Call<'_>) -> Answer {
        let Self { name, process, .. } = *self;
        let _untrimmed: [Option<_>; MAX_GPUS] = {
            let mut pools = self.pools().peekable();
            array::from_fn(|at| {
                let next = pools.next_if(|(gpu, ..)| usize::from(*gpu) == at);
                next.map(|(_, _, pool)| pool.tight.lock())
            })
        };
        let mut outcome = self.attempt(upload, |bytes| if self.is_mapped { 0 } else { bytes });
        if matches!(outcome, Err(Lack::Quota { .. })) {
            self.reclaim();
            outcome = self.attempt(upload, |bytes| bytes);
        }
        match outcome {
            Ok(()) => self.settled([const { None }; MAX_GPUS], call),
            Err(Lack::Quota { gpu, bytes, reason }) => {
                self.reclaim();
                for (_, _, pool) in self.pools() {
                    pool.owe(process);
                }
                let refused = process.account.refuse(reason, usize::from(gpu), bytes);
                let asked = Asked::Bytes(self.needs.bytes[usize::from(gpu)]);
                Err(quota::refuse(process, name, asked, &refused))
            }
            Err(Lack::Driver(refusal)) => Err(refusal),
        }
    }

    /// The caller holds the pools' `tight`.
    fn reclaim(&self) {
        for (gpu, ..) in self.pools() {
            self.process.pools.trim(self.process, gpu, true);
        }
    }

    /// Uploads with `least` reserved of what each GPU's nodes ask for.
    fn attempt(&self, upload: Call<'_>, least: impl Fn(u64) -> u64) -> Result<(), Lack> {
        let mut reserved: Reserved = [const { None }; MAX_GPUS];
        for (gpu, bytes, _) in self.pools() {
            let here = match least(bytes) {
                0 => None,
                least => Some(self.try_reserve(gpu, least)?),
            };
            reserved[usize::from(gpu)] = here;
        }
        for (gpu, _, pool) in self.pools() {
            if let Some(here) = &reserved[usize::from(gpu)] {
                pool.begin(here.bytes());
            }
        }
        let uploaded = upload();
        let mut short = None;
        for (gpu, _, pool) in self.pools() {
            let lacking = match reserved[usize::from(gpu)].take() {
                Some(here) => pool.settle_call(self.process, here),
                None => pool.settle(self.process).lacking,
            };
            if lacking > 0 {
                match self.try_reserve(gpu, lacking) {
                    Ok(more) => {
                        pool.begin(lacking);
                        pool.settle_call(self.process, more);
                    }
                    Err(lack) => short = Some(lack),
                }
            }
        }
        uploaded.map_err(Lack::Driver)?;
        short.map_or(Ok(()), Err)
    }

    /// Asks nothing back: that would unmap what has just been mapped.
    fn try_reserve(&self, gpu: u8, bytes: u64) -> Result<Reservation<'static>, Lack> {
        let reserved = self.process.account.try_reserve(usize::from(gpu), bytes);
        reserved.map_err(|reason| Lack::Quota { gpu, bytes, reason })
    }
}

/// `cuGraphUpload`. Drivers without it have no allocation nodes.
pub(crate) fn upload(exec: CUgraphExec, stream: Stream) -> Answer {
    match real::cuGraphUpload.get() {
        // SAFETY: the caller's graph and stream.
        Some(upload) => answer(unsafe { upload(exec, stream.handle()) }),
        None => Ok(()),
    }
}
