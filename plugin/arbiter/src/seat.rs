//! One tenant at the arbiter: its page, its processes, its connections.

use std::collections::{BTreeMap, VecDeque};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::time::{Duration, Instant};

use tessera_region::layout::{
    GATE_CLOSED, GATE_OPEN, GATE_SOCKET, GATE_SOLO, GATE_YIELD, QUOTA_FILE, gate_state,
};
use tessera_region::quota::{Policy as PagePolicy, QuotaWriter};
use tessera_region::usage::{SlotView, UsageFile};

use super::ArbiterError;
use super::bound::Bound;
use super::lane::Lane;
use super::policy::{GpuIndex, Kind, Pace, Share, State};
use tessera_config::Leases;
use tessera_peers::socket::Listening;

/// How long processes that another arbiter served are given to come: they look at the gate every
/// 100 ms at least.
const STRANGERS: Duration = Duration::from_millis(250);
/// And how long those that come are given to drain.
const ARREARS: Duration = Duration::from_secs(1);
/// Predicted work in flight where somebody may be woken who must not wait for a whole window.
const NARROW: Duration = Duration::from_micros(250);
/// How far back what a tenant got is remembered, and how finely.
const REMEMBERED_NS: u64 = 10_000_000_000;
const SAMPLE_NS: u64 = 100_000_000;

/// Quota pages by allocation: device and inode.
pub(super) type Served = BTreeMap<String, (u64, u64)>;

/// A tenant's pages as the arbiter needs them, opened by whoever hands it over: the arbiter's thread
/// opens nothing.
#[derive(Debug)]
pub(super) struct Opened {
    pub id: String,
    pub uuids: Vec<String>,
    /// `None`: not to be arbitrated.
    pub share: Option<Share>,
    pub page: QuotaWriter,
    /// Device and inode of the quota page.
    pub file: (u64, u64),
    /// Processes there that may have work in flight, as far as that can be told.
    pub in_use: usize,
    /// `None` where the socket that is there is to be kept.
    pub listening: Option<Listening>,
}

impl Opened {
    /// The pages in `dir`, which must exist. The socket is made if another page was served before, or
    /// none, and where it has been removed.
    pub fn open(dir: &Path, served: &Served) -> Result<Self, ArbiterError> {
        let socket = |error| ArbiterError::Socket { path: dir.to_owned(), error };
        let page = QuotaWriter::open(dir)?;
        let meta = std::fs::metadata(dir.join(QUOTA_FILE));
        let meta = meta.map_err(socket)?;
        let spec = page.spec();
        let share = spec.gpus.first().and_then(|gpu| {
            let kind = match gpu.policy {
                PagePolicy::Burst => Kind::Burst,
                PagePolicy::Strict => Kind::Strict,
                PagePolicy::None => return None,
            };
            Some(Share { millis: gpu.cores_millis, kind })
        });
        let in_use = UsageFile::open_as(dir, page.abi()).map_or(usize::MAX, |usage| users(&usage));
        let file = (meta.dev(), meta.ino());
        let listens = served.get(&spec.allocation) == Some(&file) && is_socket(dir);
        let listening = (share.is_some() && !listens).then(|| Lane::listen(dir)).transpose();
        Ok(Opened {
            id: spec.allocation,
            uuids: spec.gpus.into_iter().map(|gpu| gpu.uuid).collect(),
            share,
            page,
            file,
            in_use,
            listening: listening.map_err(socket)?,
        })
    }
}

fn is_socket(dir: &Path) -> bool {
    let meta = std::fs::symlink_metadata(dir.join(GATE_SOCKET));
    meta.is_ok_and(|meta| meta.file_type().is_socket())
}

/// Processes that hold a slot. A page that cannot be asked counts as used by many.
fn users(usage: &UsageFile) -> usize {
    match (usage.any_slot_locked(), usage.glance()) {
        (Ok(false), _) => 0,
        (Ok(true), Ok(found)) => {
            let living = |slot: &&SlotView| usage.slot_locked(slot.index).unwrap_or(true);
            found.slots.iter().filter(living).count().max(1)
        }
        _ => usize::MAX,
    }
}

#[derive(Debug)]
pub(super) struct Seat {
    pub id: String,
    pub uuids: Vec<String>,
    pub gpus: Vec<GpuIndex>,
    pub share: Share,
    pub file: (u64, u64),
    pub lane: Lane,
    pub bound: Bound,
    /// Where its part of the cycle begins.
    pub phase: u32,
    pub state: State,
    /// Messages of another epoch, said twice, or of a kind that the gate does not hear.
    pub ignored: u64,
    page: QuotaWriter,
    /// Window, in operations and microseconds, and patience, in microseconds, as written last.
    pace: Option<(u32, u32, u32)>,
    /// Whether the policy knows that this closing is drained.
    settled: bool,
    /// Whether the one that is next has been woken for the end of this closing.
    roused: bool,
    /// Until when processes that another arbiter served are waited for, and how many there are.
    strangers: Option<(Instant, usize)>,
    /// Until when those that came are waited for.
    arrears: Option<Instant>,
    /// When and how much had been leased, the newest last.
    samples: VecDeque<(u64, u64)>,
}

impl Seat {
    /// Closes the gate of a tenant that is taken on.
    pub fn new(
        opened: Opened,
        gpus: Vec<GpuIndex>,
        share: Share,
        lane: Lane,
        now: Instant,
    ) -> Self {
        let Opened { id, uuids, page, file, in_use, .. } = opened;
        let epoch = set(&page, GATE_CLOSED);
        let mut bound = Bound::new(epoch);
        if in_use > 0 {
            bound.fear_strangers();
        }
        Seat {
            id,
            uuids,
            gpus,
            share,
            file,
            lane,
            bound,
            phase: page.phase(0),
            state: State::Closed,
            ignored: 0,
            page,
            pace: None,
            settled: in_use == 0,
            roused: false,
            strangers: (in_use > 0).then_some((now + STRANGERS, in_use)),
            arrears: (in_use > 0).then_some(now + ARREARS),
            samples: VecDeque::new(),
        }
    }

    /// Writes a state to all gates, in a new epoch.
    pub fn set(&mut self, state: State) {
        let word = match state {
            State::Solo => GATE_SOLO,
            State::Open => GATE_OPEN,
            State::Yield => GATE_YIELD,
            State::Closed => GATE_CLOSED,
        };
        self.state = state;
        // A closed gate stays as it is: another epoch would only ask for another drain.
        let is_closed = gate_state(self.page.gate(0)) == GATE_CLOSED;
        if state == State::Closed && is_closed {
            return;
        }
        let epoch = set(&self.page, word);
        match state {
            State::Closed => {
                self.bound.close(epoch);
                (self.settled, self.roused) = (false, false);
            }
            _ => self.bound.open(epoch),
        }
    }

    /// Closes the closed gate once more, in a new epoch: each process that has drained lets one launch
    /// pass that waits, and all drain again.
    pub fn close_again(&mut self) {
        let epoch = set(&self.page, GATE_CLOSED);
        self.bound.close(epoch);
        self.settled = false;
    }

    /// True once for each closing: when the last process has drained.
    pub fn has_settled(&mut self) -> bool {
        let news = self.state == State::Closed && !self.settled && self.bound.owing() == 0;
        self.settled |= news;
        news
    }

    /// True once for each closing, so that a tenant which says over and over that its end is near keeps
    /// nobody awake.
    pub fn is_first_word(&mut self) -> bool {
        !std::mem::replace(&mut self.roused, true)
    }

    /// Wakes one thread that waits at the gate, because it is about to open.
    pub fn rouse(&self) {
        self.page.rouse(0);
    }

    pub fn beat(&self, now_ns: u64) {
        self.page.set_arbiter(now_ns);
    }

    pub fn set_phase(&mut self, millis: u32) {
        self.phase = millis;
        (0..self.uuids.len()).for_each(|gpu| self.page.set_phase(gpu, millis));
    }

    /// Writes how the lease is to be used that is about to be given, where that has changed.
    pub fn set_pace(&mut self, leases: &Leases, pace: Pace) {
        let narrow = if pace.is_narrow { NARROW } else { Duration::MAX };
        let us = |us: u128| u32::try_from(us).unwrap_or(u32::MAX);
        let window = us(leases.window_time.min(narrow).as_micros());
        let idle = us(Duration::from_nanos(pace.idle_ns).as_micros());
        let pace = (leases.window, window, idle);
        if self.pace.replace(pace) == Some(pace) {
            return;
        }
        for gpu in 0..self.uuids.len() {
            self.page.set_window(gpu, leases.window, window);
            self.page.set_idle(gpu, idle);
        }
    }

    /// Nobody arbitrates it any more: as a page is at the beginning.
    pub fn set_free(&self) {
        Self::free(&self.page);
    }

    /// As [`Seat::set_free`], of a page that has no seat.
    pub fn free(page: &QuotaWriter) {
        page.set_arbiter(0);
        if gate_state(page.gate(0)) != GATE_SOLO {
            set(page, GATE_SOLO);
        }
    }

    /// When [`Seat::forget_strangers`] is due.
    pub fn strangers_until(&self) -> Option<Instant> {
        self.strangers.map(|(until, _)| until).or(self.arrears)
    }

    /// Waits no longer for processes nobody knows, if they have come or had their time.
    pub fn forget_strangers(&mut self, now: Instant) {
        let bound = self.bound.len();
        if self.strangers.take_if(|(until, users)| *until <= now || bound >= *users).is_some() {
            self.bound.forget_strangers();
        }
        if self.strangers.is_none() && self.bound.owing() == 0 {
            self.arrears = None;
        }
        if self.arrears.take_if(|until| *until <= now).is_some() {
            self.bound.forgive_strangers();
        }
    }

    /// Whether [`Seat::sample`] is due.
    pub fn wants_sample(&self, now_ns: u64) -> bool {
        self.samples.back().is_none_or(|(at, _)| now_ns >= at.saturating_add(SAMPLE_NS))
    }

    /// Remembers what it had got until now.
    pub fn sample(&mut self, now_ns: u64, leased_ns: u64) {
        self.samples.push_back((now_ns, leased_ns));
        let begin = now_ns.saturating_sub(REMEMBERED_NS + SAMPLE_NS);
        while self.samples.front().is_some_and(|(at, _)| *at < begin) {
            self.samples.pop_front();
        }
    }

    /// Thousandths of a GPU that it got in the last `ns`, or as far back as it is known.
    pub fn got_millis(&self, now_ns: u64, leased_ns: u64, ns: u64) -> u32 {
        let begin = now_ns.saturating_sub(ns);
        let since = self.samples.iter().rev().find(|(at, _)| *at <= begin);
        let Some((at, before)) = since.or(self.samples.front()) else { return 0 };
        let (time, got) = (now_ns.saturating_sub(*at), leased_ns.saturating_sub(*before));
        let millis = u128::from(got) * 1000 / u128::from(time.max(1));
        u32::try_from(millis).unwrap_or(u32::MAX)
    }
}

/// The first GPU's gate is the one that the shim looks at, so it is first; its epoch is returned.
fn set(page: &QuotaWriter, word: u32) -> u32 {
    let epoch = page.set_gate(0, word);
    for gpu in 1..page.gpus() {
        let _ = page.set_gate(gpu, word);
    }
    epoch
}
