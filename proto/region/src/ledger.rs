//! Publish, then verify: how processes that trust each other's words, and nobody's life, share one
//! limit without a lock. Pure: no time, no system call, no page; those come in through [`Ledger`]
//! and [`Contention`]. One GPU at a time; [`reserve_in_parts`] asks several limits for parts of one
//! request.
//!
//! # The words
//!
//! Every slot has two words per GPU. **charged** is what is granted plus what is reserved for
//! driver calls under way; it alone decides whether a request may go ahead. **granted** is what
//! driver calls have really obtained; it alone decides whether a request is refused. Within a slot
//! `granted ≤ charged` at all times, because charged is raised first and lowered last.
//!
//! # A request of `n` bytes
//!
//! 1. *Publish*: add `n` to the own charged word; `fence(SeqCst)`.
//! 2. *Verify*: read the high-water mark, sum all charged words. Within the limit: it is reserved.
//! 3. Else *judge*: read a consistent sum `G` of granted words. If `G + n` exceeds the limit, look
//!    for dead owners' slots, and if a later judgement after a look that found none says the same:
//!    withdraw, refuse.
//! 4. Else only unsettled requests stand in the way: *withdraw*, wait at random, and try again
//!    where a look without publishing says that it could go; after a few rounds queue for a lock.
//!    Its holder leaves its bytes published, so that nobody can overtake it for ever, and waits
//!    until it fits or `G` refuses it.
//!
//! Nobody waits with reserved bytes in hand: two that did could wait for each other. So a request
//! that turns out to need more than it reserved counts what it has as granted (which is true: the
//! driver gave it) before it asks for the rest.
//!
//! # Nobody passes the limit
//!
//! Take any set of requests that are reserved at the same time (verified, and not yet released),
//! and of these the one, `B`, whose last fence is latest in the total order of SeqCst fences. Any
//! other, `A`, published before its own fence, which is before `B`'s, which is before `B` read: so
//! `B`'s sum contains `A`'s bytes (C++20 [atomics.order] 4.4: a read after a fence sees a write
//! before an earlier fence, or a later one; the later ones either add, or subtract what is no
//! longer reserved). So does the high-water mark, which every owner raised before it first
//! published. `B` found the sum within the limit, so the set is. What others publish and withdraw
//! meanwhile only makes sums larger. Process death only leaves bytes in the sum, until the driver has
//! given them back and somebody who holds the dead owner's lock takes them away. Loom must see fences here: it treats SeqCst
//! *accesses* as weaker than the standard does, and reports an overshoot that cannot happen.
//!
//! The subtraction in a release is `Release` and the sum `Acquire`: the driver's free has happened
//! before the bytes are anybody else's.
//!
//! # Nobody who fits is refused
//!
//! A refusal needs `G + n` over the limit for a `G` that was true at one moment of the request, so
//! that it did not fit then. A plain sum is no such `G`: one slot's word read before a release and
//! another's after the grant that this release made room for add up to bytes that were never
//! granted at once. Hence the *consistent* sum: each slot has an epoch (`claimed + frees`: the
//! time of its claim plus the releases since) that every lowering of `granted` changes and nothing
//! brings back (a slot is claimed again at a later time, and a release takes longer than a
//! nanosecond). If no epoch changed from before the first read to after the last, no granted word
//! was lowered meanwhile, so each word was at least what was read when the reading ended, and so
//! was the sum. The epoch changes *after* `granted` was lowered and *before* `charged` is: who
//! sees a grant that needed the room also sees the epoch changed.
//!
//! So of two requests that each fit but not together, at most one is refused, and only after the
//! other was granted. The exceptions are distinct: a request that fits gave up after
//! [`Contention::pause`] said so, because a process is stopped in the middle of a driver call whose
//! bytes may or may not come true ([`Reason::Contended`]), or because the driver does not give back
//! what dead processes held ([`Reason::Departing`]).
//!
//! # Several limits
//!
//! A process that has several shares of one GPU asks them together ([`reserve_in_parts`]). Each limit
//! has words of its own, and a request publishes a part in each. It is reserved when every part was
//! verified after the last was published, so the proof above holds for each limit by itself. What
//! was published beside a part that does not fit is withdrawn. Judged is what the limits have left
//! together, by a sum that is consistent over all of their slots: else a process that releases in one
//! and is granted in another would be counted twice. A process that queues holds the queues of all its limits, in
//! their order, so two that wait with bytes published share no limit, and do not wait for each other.
//!
//! # The dead
//!
//! A process is dead before the driver has its memory back, and until then its bytes count against
//! the limit like anybody's: the slot is *departing*. But they decide no refusal: `G` is the sum of
//! the others, and who does not fit beside the departing alone waits, as for an unsettled request.
//! [`Contention::recover_dead`] notices the dead and takes away what the driver has back.

mod parts;

pub use parts::{MAX_PARTS, Split, reserve_in_parts};

pub use core::sync::atomic::Ordering;

/// A 64-bit word that processes share: `core`'s in the pages, loom's, which have no layout, in its model.
pub trait Word {
    /// Loads the value.
    fn load(&self, order: Ordering) -> u64;
    /// Adds, and returns the value before. Wraps; callers bound what they add.
    fn add(&self, bytes: u64, order: Ordering) -> u64;
    /// Subtracts, stopping at zero.
    fn subtract(&self, bytes: u64, order: Ordering);
    /// `fence(SeqCst)` in the same memory model.
    fn fence();
}

macro_rules! impl_word {
    ($($path:ident)::+) => {
        impl Word for $($path)::+::AtomicU64 {
            #[inline]
            fn load(&self, order: Ordering) -> u64 {
                $($path)::+::AtomicU64::load(self, order)
            }
            #[inline]
            fn add(&self, bytes: u64, order: Ordering) -> u64 {
                self.fetch_add(bytes, order)
            }
            #[inline]
            fn subtract(&self, bytes: u64, order: Ordering) {
                // Never fails: the closure always returns a value.
                let _ = self.fetch_update(order, Ordering::Relaxed, |value| {
                    Some(value.saturating_sub(bytes))
                });
            }
            #[inline]
            fn fence() {
                $($path)::+::fence(Ordering::SeqCst);
            }
        }
    };
}

impl_word!(core::sync::atomic);
#[cfg(feature = "loom")]
impl_word!(loom::sync::atomic);

/// One GPU's words in all slots, seen by the owner of one of them.
pub trait Ledger {
    /// The atomics in use.
    type Word: Word;
    /// The slot of this process.
    fn own(&self) -> usize;
    /// One more than the highest slot ever claimed, at most
    /// [`crate::layout::SLOTS`]. Must be a fresh load.
    fn high_water(&self) -> usize;
    /// Granted and reserved bytes.
    fn charged(&self, slot: usize) -> &Self::Word;
    /// Granted bytes.
    fn granted(&self, slot: usize) -> &Self::Word;
    /// When the slot was claimed; 0 in a free one.
    fn claimed(&self, slot: usize) -> &Self::Word;
    /// Releases since.
    fn frees(&self, slot: usize) -> &Self::Word;
    /// Whether the slot's owner is known to be dead, and the driver may have its memory still.
    fn is_departing(&self, slot: usize) -> bool;
    /// What charges may reach, at most [`crate::layout::MAX_BYTES`]: the quota less what the plugin
    /// saw beyond the charges. Read at each use: it changes, either way.
    fn limit(&self) -> u64;
}

/// What a request can do while others stand in its way.
pub trait Contention {
    /// Looks for dead owners: marks their slots as departing, and zeroes those whose memory the driver
    /// has back. Whether it changed any.
    fn recover_dead(&mut self) -> bool;
    /// Tries to become the one request that waits with its bytes published; holds on success,
    /// until dropped. May always fail: that costs fairness, not correctness.
    fn try_queue(&mut self) -> bool;
    /// Waits a little, at random, so as not to be refused for `reason`. False when it has waited long enough.
    fn pause(&mut self, reason: Reason) -> bool;
}

/// Why a request was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// What is granted, plus the request, exceeds the limit.
    OverQuota,
    /// It would fit, but another process's request stood in the way all the time: one that is
    /// stopped in the middle of a driver call, for instance.
    Contended,
    /// It would fit, but the driver has not given back what dead processes held.
    Departing,
}

/// Reserves `bytes`: afterwards they are in the own charged word, or were refused.
#[inline]
pub fn reserve<L: Ledger, C: Contention>(
    ledger: &L,
    bytes: u64,
    contention: impl FnOnce() -> C,
) -> Result<(), Reason> {
    // What can never fit is not published: words could wrap.
    if bytes > ledger.limit() {
        return Err(Reason::OverQuota);
    }
    publish(ledger, bytes);
    if charged_total(ledger) <= ledger.limit() {
        return Ok(());
    }
    contend_alone(ledger, bytes, contention)
}

/// Of `bytes` that are published at one limit. Apart, so that the way past it needs no room for this.
#[cold]
#[inline(never)]
fn contend_alone<L: Ledger, C: Contention>(
    ledger: &L,
    bytes: u64,
    contention: impl FnOnce() -> C,
) -> Result<(), Reason> {
    let mut split = [0; MAX_PARTS];
    split[0] = bytes;
    parts::contend(core::slice::from_ref(ledger), bytes, &mut split, contention())
}

/// Turns `reserved` bytes into `actual ≤ reserved` granted ones. Returns what the process holds.
#[inline]
pub fn commit<L: Ledger>(ledger: &L, reserved: u64, actual: u64) -> u64 {
    // Release: pairs with Acquire in `granted_total`: who sees the grant sees what made its room.
    let before = ledger.granted(ledger.own()).add(actual, Ordering::Release);
    withdraw(ledger, reserved.saturating_sub(actual));
    before.saturating_add(actual)
}

/// Grants `bytes` that the driver has given without having been asked for, whatever the limit says:
/// until they are released, a request for more than the limit leaves beside them is refused.
/// Returns what the process holds.
pub fn owe<L: Ledger>(ledger: &L, bytes: u64) -> u64 {
    publish(ledger, bytes);
    commit(ledger, bytes, bytes)
}

/// Takes granted bytes back, after the driver released them.
#[inline]
pub fn release<L: Ledger>(ledger: &L, bytes: u64) {
    unsettle(ledger, bytes);
    withdraw(ledger, bytes);
}

/// Turns granted bytes into reserved ones again: the driver is about to release them.
#[inline]
pub fn unsettle<L: Ledger>(ledger: &L, bytes: u64) {
    let own = ledger.own();
    ledger.granted(own).subtract(bytes, Ordering::Release);
    // Release: pairs with the first Acquire in `granted_total`; a process that counts this release has
    // seen the subtraction above.
    ledger.frees(own).add(1, Ordering::Release);
}

/// Takes reserved bytes back.
#[inline]
pub fn withdraw<L: Ledger>(ledger: &L, bytes: u64) {
    if bytes > 0 {
        // Release: pairs with Acquire in `charged_total`.
        ledger.charged(ledger.own()).subtract(bytes, Ordering::Release);
    }
}

/// Sum of what all processes have charged. Saturates.
#[inline]
pub fn charged_total<L: Ledger>(ledger: &L) -> u64 {
    // Acquire: pairs with Release in `withdraw`.
    (0..ledger.high_water())
        .map(|slot| ledger.charged(slot).load(Ordering::Acquire))
        .fold(0, u64::saturating_add)
}

/// A sum of granted words, of slots that are not departing, that was exceeded by no earlier moment's
/// leftovers: at the end of the call at least that much was granted to them. `None` if releases kept
/// interfering.
pub fn granted_total<L: Ledger>(ledger: &L) -> Option<u64> {
    parts::at_rest(core::slice::from_ref(ledger), || granted(ledger, Ordering::Acquire))
}

/// Bytes of departing slots: the sum of their charged words. Parts of it may be of different moments.
/// Saturates.
pub fn departing_sum<L: Ledger>(ledger: &L) -> u64 {
    (0..ledger.high_water())
        .filter(|&slot| ledger.is_departing(slot))
        .map(|slot| ledger.charged(slot).load(Ordering::Relaxed))
        .fold(0, u64::saturating_add)
}

/// A plain sum of granted words, for messages: parts of it may be of different moments. Saturates.
pub fn granted_sum<L: Ledger>(ledger: &L) -> u64 {
    granted(ledger, Ordering::Relaxed)
}

/// The granted words of slots that are not departing.
fn granted<L: Ledger>(ledger: &L, order: Ordering) -> u64 {
    (0..ledger.high_water())
        .filter(|&slot| !ledger.is_departing(slot))
        .map(|slot| ledger.granted(slot).load(order))
        .fold(0, u64::saturating_add)
}

#[inline]
fn publish<L: Ledger>(ledger: &L, bytes: u64) {
    ledger.charged(ledger.own()).add(bytes, Ordering::Relaxed);
    // The fence the proof is about.
    L::Word::fence();
}
