//! The accounting under every interleaving and every value the memory model allows:
//!
//! ```text
//! cargo test -p tessera-region --features loom --test loom
//! ```
//!
//! Bounded by [`PREEMPTIONS`] where the whole space is too large; well under a minute altogether.
//! What each model leaves out is said there. Two models take something away (the fence, the
//! epochs) and must fail: they show that the others can.

use loom::sync::atomic::{AtomicU64, fence};
use loom::sync::{Arc, Mutex, MutexGuard};
use loom::thread;
use tessera_region::ledger::{self, Contention, Ledger, Ordering, Reason, Word};

/// Forced switches per execution. The bugs this protocol had in earlier drafts needed at most two.
const PREEMPTIONS: usize = 3;

/// One GPU's words of three slots.
struct Page<W> {
    charged: [W; 3],
    granted: [W; 3],
    claimed: [W; 3],
    frees: [W; 3],
    /// Whether the slot's owner is known to be dead.
    departing: [AtomicU64; 3],
    high_water: AtomicU64,
    limit: u64,
    /// What the driver has really given, in an order that all agree on.
    driver: Mutex<u64>,
    queue: Mutex<()>,
}

trait New: Word + 'static {
    fn new(value: u64) -> Self;
}

impl New for AtomicU64 {
    fn new(value: u64) -> Self {
        AtomicU64::new(value)
    }
}

impl<W: New> Page<W> {
    /// Three slots, of which the first `claimed` are so, holding `granted`.
    fn new(limit: u64, claimed: u64, granted: [u64; 3]) -> Arc<Self> {
        let word = |value| W::new(value);
        Arc::new(Self {
            charged: granted.map(word),
            granted: granted.map(word),
            claimed: [10, 20, 30].map(word),
            frees: [0; 3].map(word),
            departing: [0; 3].map(AtomicU64::new),
            high_water: AtomicU64::new(claimed),
            limit,
            driver: Mutex::new(granted.iter().sum()),
            queue: Mutex::new(()),
        })
    }

    /// What a successful driver call does.
    fn driver_gives(&self, bytes: u64) {
        let mut driver = self.driver.lock().unwrap();
        *driver += bytes;
        assert!(*driver <= self.limit, "{} of {} granted", *driver, self.limit);
    }

    fn driver_takes(&self, bytes: u64) {
        *self.driver.lock().unwrap() -= bytes;
    }
}

/// The page as the owner of one slot sees it.
struct Owner<'a, W>(&'a Page<W>, usize);

impl<'a, W: New> Owner<'a, W> {
    /// Claims a slot as `UsageMap::claim` does, as far as sums are concerned.
    fn claim(page: &'a Page<W>, slot: usize) -> Self {
        page.high_water.fetch_max(slot as u64 + 1, Ordering::AcqRel);
        Self(page, slot)
    }
}

impl<W: New> Ledger for Owner<'_, W> {
    type Word = W;
    fn own(&self) -> usize {
        self.1
    }
    fn high_water(&self) -> usize {
        usize::try_from(self.0.high_water.load(Ordering::Acquire)).unwrap()
    }
    fn charged(&self, slot: usize) -> &W {
        &self.0.charged[slot]
    }
    fn granted(&self, slot: usize) -> &W {
        &self.0.granted[slot]
    }
    fn claimed(&self, slot: usize) -> &W {
        &self.0.claimed[slot]
    }
    fn frees(&self, slot: usize) -> &W {
        &self.0.frees[slot]
    }
    fn is_departing(&self, slot: usize) -> bool {
        self.0.departing[slot].load(Ordering::Acquire) != 0
    }
    fn limit(&self) -> u64 {
        self.0.limit
    }
}

/// Gives up at the first collision.
struct Impatient;

impl Contention for Impatient {
    fn recover_dead(&mut self) -> bool {
        false
    }
    fn try_queue(&mut self) -> bool {
        false
    }
    fn pause(&mut self, _: Reason) -> bool {
        false
    }
}

/// Waits for its turn; the queue is a mutex.
struct Patient<'a> {
    queue: &'a Mutex<()>,
    held: Option<MutexGuard<'a, ()>>,
    rounds: u32,
}

impl<'a> Patient<'a> {
    fn new<W>(page: &'a Page<W>) -> Self {
        Self { queue: &page.queue, held: None, rounds: 0 }
    }
}

impl Contention for Patient<'_> {
    fn recover_dead(&mut self) -> bool {
        false
    }
    fn try_queue(&mut self) -> bool {
        self.held = self.queue.try_lock().ok();
        self.held.is_some()
    }
    fn pause(&mut self, _: Reason) -> bool {
        self.rounds += 1;
        thread::yield_now();
        self.rounds < 8
    }
}

fn check(preemptions: Option<usize>, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    builder.check(model);
}

/// Two processes that claim and ask at the same time, one after the other's claim unseen or seen.
fn two_newcomers<W: New + Send + Sync>() {
    let page = Page::<W>::new(10, 0, [0; 3]);
    let ask = |slot| {
        let page = page.clone();
        move || {
            let owner = Owner::claim(&page, slot);
            if ledger::reserve(&owner, 6, || Impatient).is_ok() {
                page.driver_gives(6);
            }
        }
    };
    let other = thread::spawn(ask(1));
    ask(0)();
    other.join().unwrap();
}

#[test]
fn two_newcomers_never_pass_the_limit() {
    check(None, two_newcomers::<AtomicU64>);
}

/// A word whose fence does nothing.
struct Unfenced(AtomicU64);

impl New for Unfenced {
    fn new(value: u64) -> Self {
        Self(AtomicU64::new(value))
    }
}

impl Word for Unfenced {
    fn load(&self, order: Ordering) -> u64 {
        self.0.load(order)
    }
    fn add(&self, bytes: u64, order: Ordering) -> u64 {
        self.0.fetch_add(bytes, order)
    }
    fn subtract(&self, bytes: u64, order: Ordering) {
        Word::subtract(&self.0, bytes, order);
    }
    fn fence() {}
}

#[test]
#[should_panic(expected = "12 of 10 granted")]
fn without_the_fence_they_do() {
    check(None, two_newcomers::<Unfenced>);
}

/// Two threads of one process and another process.
#[test]
fn threads_that_share_a_slot_never_pass_the_limit() {
    check(Some(PREEMPTIONS), || {
        let page = Page::<AtomicU64>::new(10, 2, [0; 3]);
        let ask = |slot, bytes| {
            let page = page.clone();
            move || {
                if ledger::reserve(&Owner(&page, slot), bytes, || Impatient).is_ok() {
                    page.driver_gives(bytes);
                }
            }
        };
        let (one, two) = (thread::spawn(ask(0, 4)), thread::spawn(ask(0, 4)));
        ask(1, 4)();
        one.join().unwrap();
        two.join().unwrap();
    });
}

/// A release makes room; the process that takes it must see the driver's free before.
#[test]
fn released_bytes_are_granted_again_but_not_too_early() {
    check(Some(PREEMPTIONS), || {
        let page = Page::<AtomicU64>::new(10, 2, [6, 0, 0]);
        let releasing = {
            let page = page.clone();
            thread::spawn(move || {
                page.driver_takes(6);
                ledger::release(&Owner(&page, 0), 6);
            })
        };
        let owner = Owner(&page, 1);
        if ledger::reserve(&owner, 6, || Impatient).is_ok() {
            page.driver_gives(6);
            ledger::commit(&owner, 6, 5);
            page.driver_takes(1);
        }
        releasing.join().unwrap();
        fence(Ordering::SeqCst);
        let left = *page.driver.lock().unwrap();
        assert_eq!(ledger::charged_total(&owner), left);
        assert_eq!(ledger::granted_total(&owner), Some(left));
    });
}

/// The whole of a request, with waiting and the queue.
#[test]
fn of_two_that_each_fit_one_is_granted() {
    check(Some(2), || {
        let page = Page::<AtomicU64>::new(10, 2, [0; 3]);
        let ask = |slot| {
            let page = page.clone();
            move || {
                let owner = Owner(&page, slot);
                let result = ledger::reserve(&owner, 6, || Patient::new(&page));
                if result.is_ok() {
                    page.driver_gives(6);
                    ledger::commit(&owner, 6, 6);
                }
                result
            }
        };
        let other = thread::spawn(ask(1));
        let results = [ask(0)(), other.join().unwrap()];
        assert!(results.contains(&Ok(())), "both refused: {results:?}");
        assert!(results.contains(&Err(Reason::OverQuota)), "{results:?}");
        assert_eq!(
            page.charged.each_ref().map(|word| word.load(Ordering::Acquire)).iter().sum::<u64>(),
            6
        );
    });
}

/// Never more than 6 bytes are granted at once, but a sum read in between may say 12.
fn a_grant_moves(lower: fn(&Page<AtomicU64>), sum: fn(&Owner<AtomicU64>) -> Option<u64>) {
    let page = Page::<AtomicU64>::new(10, 2, [6, 0, 0]);
    let lowering = {
        let page = page.clone();
        thread::spawn(move || lower(&page))
    };
    let taking = {
        let page = page.clone();
        thread::spawn(move || {
            let owner = Owner(&page, 1);
            if ledger::reserve(&owner, 6, || Impatient).is_ok() {
                ledger::commit(&owner, 6, 6);
            }
        })
    };
    if let Some(total) = sum(&Owner(&page, 1)) {
        assert!(total <= 6, "torn sum {total}");
    }
    lowering.join().unwrap();
    taking.join().unwrap();
}

fn released(page: &Page<AtomicU64>) {
    ledger::release(&Owner(page, 0), 6);
}

/// What `Slot::zero` does to a dead owner's words.
fn recovered(page: &Page<AtomicU64>) {
    page.granted[0].store(0, Ordering::Release);
    page.frees[0].store(0, Ordering::Release);
    page.claimed[0].store(0, Ordering::Release);
    page.charged[0].store(0, Ordering::Release);
}

#[test]
fn a_sum_that_refuses_was_true_once_while_bytes_are_released() {
    check(Some(PREEMPTIONS), || a_grant_moves(released, |owner| ledger::granted_total(owner)));
}

#[test]
fn a_sum_that_refuses_was_true_once_while_a_slot_is_recovered() {
    check(Some(PREEMPTIONS), || a_grant_moves(recovered, |owner| ledger::granted_total(owner)));
}

#[test]
#[should_panic(expected = "torn sum 12")]
fn a_plain_sum_was_not() {
    check(Some(PREEMPTIONS), || {
        a_grant_moves(released, |owner| {
            let word = |slot| owner.granted(slot).load(Ordering::Acquire);
            Some(word(0) + word(1))
        });
    });
}

/// A request beside a dead process: notices it, as `UsageMap::recover_dead` does, and waits.
struct Mourner<'a> {
    page: &'a Page<AtomicU64>,
    rounds: u32,
    /// Whether the dead's bytes go as soon as they are noticed.
    hasty: bool,
}

impl Contention for Mourner<'_> {
    fn recover_dead(&mut self) -> bool {
        if self.hasty {
            let any = self.page.charged[0].load(Ordering::Acquire) != 0;
            recovered(self.page);
            return any;
        }
        self.page.departing[0].fetch_max(1, Ordering::AcqRel) == 0
    }
    fn try_queue(&mut self) -> bool {
        false
    }
    fn pause(&mut self, _: Reason) -> bool {
        self.rounds += 1;
        thread::yield_now();
        self.rounds < 4
    }
}

/// The driver takes a dead process down, and then somebody sees it, while another asks for its bytes.
fn beside_a_dead_process(hasty: bool) {
    let page = Page::<AtomicU64>::new(10, 2, [6, 0, 0]);
    let driver = {
        let page = page.clone();
        thread::spawn(move || {
            page.driver_takes(6);
            recovered(&page);
        })
    };
    let owner = Owner(&page, 1);
    let mourner = || Mourner { page: &page, rounds: 0, hasty };
    let asked = ledger::reserve(&owner, 6, mourner);
    let mut held = 0;
    if asked.is_ok() {
        let mut with_driver = page.driver.lock().unwrap();
        *with_driver += 6;
        held = *with_driver;
    }
    // Judged when all have ended: loom cannot unwind past a thread that has not begun.
    driver.join().unwrap();
    assert!(held <= page.limit, "{held} of {} granted", page.limit);
    assert_ne!(asked, Err(Reason::OverQuota), "it fits when the driver is done");
}

#[test]
fn a_dead_processs_bytes_are_granted_when_the_driver_has_them_and_refuse_nobody() {
    check(Some(PREEMPTIONS), || beside_a_dead_process(false));
}

#[test]
#[should_panic(expected = "12 of 10 granted")]
fn bytes_taken_from_a_dead_process_at_once_are_with_the_driver_still() {
    check(Some(PREEMPTIONS), || beside_a_dead_process(true));
}

/// What a page's slots are charged.
fn charged(page: &Page<AtomicU64>) -> u64 {
    page.charged.iter().map(|word| word.load(Ordering::Acquire)).sum()
}

/// Two processes with the same two limits, whose requests fit in parts only, and both of them.
#[test]
fn requests_in_parts_that_fit_together_are_both_granted() {
    check(Some(2), || {
        let pages = [Page::<AtomicU64>::new(3, 2, [0; 3]), Page::<AtomicU64>::new(3, 2, [0; 3])];
        let ask = |slot, bytes| {
            let pages = pages.clone();
            move || {
                let owners = [Owner(&pages[0], slot), Owner(&pages[1], slot)];
                let mut split = [0; ledger::MAX_PARTS];
                let patient = || Patient::new(&pages[0]);
                let asked = ledger::reserve_in_parts(&owners, bytes, &mut split, patient);
                let sum: u64 = split.iter().sum();
                assert_eq!(sum, if asked.is_ok() { bytes } else { 0 });
                for (page, part) in pages.iter().zip(split) {
                    page.driver_gives(part);
                }
                asked
            }
        };
        let other = thread::spawn(ask(1, 2));
        let results = [ask(0, 4)(), other.join().unwrap()];
        assert!(!results.contains(&Err(Reason::OverQuota)), "{results:?}");
        if results == [Ok(()), Ok(())] {
            assert_eq!(pages.each_ref().map(|page| charged(page)), [3, 3]);
        }
    });
}

/// One has both limits and one has the second alone: of two that each fit, one is granted.
#[test]
fn a_limit_that_two_have_is_kept_by_both() {
    check(Some(2), || {
        let pages = [Page::<AtomicU64>::new(3, 2, [0; 3]), Page::<AtomicU64>::new(3, 2, [0; 3])];
        let other = {
            let pages = pages.clone();
            thread::spawn(move || {
                let owner = Owner(&pages[1], 1);
                let asked = ledger::reserve(&owner, 2, || Patient::new(&pages[1]));
                if asked.is_ok() {
                    pages[1].driver_gives(2);
                    ledger::commit(&owner, 2, 2);
                }
                asked
            })
        };
        let owners = [Owner(&pages[0], 0), Owner(&pages[1], 0)];
        let mut split = [0; ledger::MAX_PARTS];
        let asked = ledger::reserve_in_parts(&owners, 5, &mut split, || Patient::new(&pages[1]));
        for ((page, owner), part) in pages.iter().zip(&owners).zip(split) {
            page.driver_gives(part);
            ledger::commit(owner, part, part);
        }
        let asked = [asked, other.join().unwrap()];
        assert!(asked.contains(&Ok(())), "both refused: {asked:?}");
        assert!(asked.contains(&Err(Reason::OverQuota)), "{asked:?}");
    });
}

/// What one process releases in one limit and is granted in the other counts once: a request that fits
/// beside it at all times is not refused.
#[test]
fn bytes_that_move_between_limits_refuse_nobody() {
    check(Some(PREEMPTIONS), || {
        let pages = [Page::<AtomicU64>::new(4, 2, [4, 0, 0]), Page::<AtomicU64>::new(4, 2, [0; 3])];
        let moving = {
            let pages = pages.clone();
            thread::spawn(move || {
                ledger::release(&Owner(&pages[0], 0), 4);
                let owner = Owner(&pages[1], 0);
                if ledger::reserve(&owner, 4, || Impatient).is_ok() {
                    ledger::commit(&owner, 4, 4);
                }
            })
        };
        let owners = [Owner(&pages[0], 1), Owner(&pages[1], 1)];
        let mut split = [0; ledger::MAX_PARTS];
        let asked = ledger::reserve_in_parts(&owners, 4, &mut split, || Impatient);
        assert_ne!(asked, Err(Reason::OverQuota));
        moving.join().unwrap();
    });
}
