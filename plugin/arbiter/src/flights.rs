//! What the flight pages of one tenant's processes say: whether it has something in flight, and whether a thread of it
//! polls at its gate. Words of processes that are not trusted: they move their own tenant's lease alone, and a look
//! costs no more than it may, see [`Flights::cost_ns`].

use std::collections::BTreeMap;
use std::sync::atomic::{Ordering, fence};

use tessera_region::flight::{CONTEXTS, FlightPage, FlightReader, InFlight, LANES};

/// Operations that no marker covers are complete so long after the words stood still: only a thread of the process could
/// mark them, and it does not run.
const STANDS_STILL_NS: u64 = 1_000_000;
/// The most for which that is waited, whatever the process says that an operation takes.
const STANDS_STILL_MOST_NS: u64 = 100_000_000;
/// A thread that has not looked at the gate for so long does not poll any more, whatever it said, microseconds.
const AWAKE_US: i32 = 100;
/// So long a thread may take to find out that there is room for its launch.
const WAKES_NS: u64 = 200_000;
/// What a look costs: for a page, and for each word of a lane, nanoseconds.
const PAGE_NS: u64 = 200;
const WORD_NS: u64 = 2;

/// The clock of the pages: microseconds modulo 2^32.
#[expect(clippy::cast_possible_truncation, reason = "modulo")]
fn us(ns: u64) -> u32 {
    (ns / 1000) as u32
}

/// One process's page, and what the last look at it showed.
#[derive(Debug)]
struct Flight<P> {
    page: P,
    seen: Words,
    /// Since when its words are as they are, and since when nothing is in flight and nothing was admitted.
    still_ns: u64,
    quiet_ns: Option<u64>,
    /// When what is in flight should have landed, where that is known.
    lands_ns: Option<u64>,
    /// When the gate opened last, and what had been admitted by then.
    opened_ns: u64,
    opened: u64,
    /// Whether the last look at the closed gate found more of it complete.
    moves: bool,
    /// It may have launched without counting: before its hello, or at a gate that said SOLO.
    uncounted: bool,
}

/// The words that change when a process does anything.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Words {
    admitted: u64,
    operations: u64,
    marked: u64,
    closed: u32,
    awake: u32,
}

impl Words {
    fn of(page: &FlightPage, flight: InFlight) -> Self {
        Words {
            admitted: page.admitted.load(Ordering::Relaxed),
            operations: flight.operations,
            marked: page.marked.load(Ordering::Relaxed),
            closed: page.closed.load(Ordering::Relaxed),
            awake: page.awake.load(Ordering::Relaxed),
        }
    }

    fn complete(&self) -> u64 {
        self.admitted.wrapping_sub(self.operations)
    }
}

/// A tenant's pages, by the process's number.
#[derive(Debug)]
pub(super) struct Flights<P = FlightReader>(BTreeMap<u64, Flight<P>>);

impl<P> Default for Flights<P> {
    fn default() -> Self {
        Flights(BTreeMap::new())
    }
}

impl<P: std::ops::Deref<Target = FlightPage>> Flights<P> {
    /// A process has sent its page.
    pub fn insert(&mut self, now_ns: u64, process: u64, page: P) {
        // An earlier arbiter may have invited it.
        page.release();
        let seen = Words::of(&page, page.in_flight());
        let flight = Flight {
            page,
            seen,
            still_ns: now_ns,
            quiet_ns: None,
            lands_ns: None,
            opened_ns: now_ns,
            opened: seen.admitted,
            moves: false,
            uncounted: true,
        };
        self.0.insert(process, flight);
    }

    /// It is gone.
    pub fn remove(&mut self, process: u64) {
        self.0.remove(&process);
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// The closed gate is about to open.
    pub fn opens(&mut self, now_ns: u64) {
        let mut launching = 0;
        for flight in self.0.values_mut() {
            let complete = flight.page.complete();
            launching += u32::from(complete != flight.opened);
            flight.seen.admitted = flight.page.admitted.load(Ordering::Relaxed);
            // What was queued ahead is of this lease.
            (flight.opened_ns, flight.opened) = (now_ns, complete);
            flight.quiet_ns = (complete == flight.seen.admitted).then_some(now_ns);
            flight.page.opened_us.store(us(now_ns).max(1), Ordering::Relaxed);
        }
        for flight in self.0.values() {
            flight.page.launching.store(launching, Ordering::Relaxed);
        }
    }

    /// The gate has another word.
    pub fn release(&self) {
        self.0.values().for_each(|flight| flight.page.release());
    }

    /// Nothing of the tenant is in flight at the gate that was closed with this word: its processes may queue work ahead
    /// of its turn, where their pages show the same. Whether one was not invited before.
    pub fn invite(&self, word: u32) -> bool {
        let pages = self.0.values().map(|flight| &*flight.page);
        let is_due = |page: &&FlightPage| {
            page.invited.load(Ordering::Relaxed) != word && page.in_flight().operations == 0
        };
        // SeqCst: see `tessera_region::flight`.
        pages.filter(is_due).map(|page| page.invited.store(word, Ordering::SeqCst)).count() != 0
    }

    /// One process stands still, perhaps because it is ahead of another: tells each how far it is behind.
    pub fn show_behind(&self) {
        let in_flight = |flight: &Flight<P>| flight.page.in_flight().operations;
        let most = self.0.values().map(in_flight).max().unwrap_or(0);
        for flight in self.0.values() {
            let behind = most.saturating_sub(in_flight(flight));
            flight.page.behind.store(u32::try_from(behind).unwrap_or(u32::MAX), Ordering::Relaxed);
        }
    }

    /// Whether work waits on the GPU for the gate that was closed with this word to open.
    pub fn is_ahead(&self, word: u32) -> bool {
        self.0.values().any(|flight| {
            flight.page.invited.load(Ordering::Relaxed) == word
                && flight.page.in_flight().operations != 0
        })
    }

    /// The gate says SOLO: launches are not counted.
    pub fn solo(&mut self) {
        self.0.values_mut().for_each(|flight| flight.uncounted = true);
    }

    /// A process has drained, as it says itself.
    pub fn drained(&mut self, process: u64) {
        if let Some(flight) = self.0.get_mut(&process) {
            flight.uncounted = false;
        }
    }

    /// The processes that have nothing in flight at a gate that was closed with this word, and for how long each had
    /// before, nanoseconds.
    pub fn landed(&mut self, now_ns: u64, word: u32) -> Vec<(u64, u64)> {
        // The gate was closed before, and what is admitted is read after.
        fence(Ordering::SeqCst);
        let (mut landed, mut moved) = (Vec::new(), 0);
        for (process, flight) in &mut self.0 {
            let before = flight.seen.complete();
            if flight.has_landed(now_ns, word) {
                landed.push((*process, flight.used_ns(now_ns)));
                flight.uncounted = false;
            }
            flight.moves = flight.seen.complete() != before;
            moved += usize::from(flight.moves);
        }
        for flight in self.0.values().filter(|flight| moved > usize::from(flight.moves)) {
            flight.page.elsewhere_us.store(us(now_ns), Ordering::Relaxed);
        }
        landed
    }

    /// Since when the tenant, at an open gate, has nothing in flight, admitted nothing, and nobody waits for room.
    pub fn quiet_since(&mut self, now_ns: u64) -> Option<u64> {
        fence(Ordering::SeqCst);
        let mut since = Some(0);
        for flight in self.0.values_mut() {
            let quiet = flight.quiet_since(now_ns);
            since = since.zip(quiet).map(|(a, b)| a.max(b));
        }
        since
    }

    /// Whether a thread polls at the gate that says this word, and has a CPU.
    pub fn is_awake(&self, now_ns: u64, word: u32) -> bool {
        let polls = |flight: &Flight<P>| {
            // The word first: who sets it has noted the time before.
            flight.page.awake.load(Ordering::Acquire) == word && {
                let at_us = flight.page.awake_us.load(Ordering::Relaxed);
                // It may have looked since `now`.
                us(now_ns).wrapping_sub(at_us).cast_signed() < AWAKE_US
            }
        };
        self.0.values().any(polls)
    }

    /// Whether a launch waits at the closed gate.
    pub fn waits(&self) -> bool {
        self.0.values().any(|flight| flight.page.waiting.load(Ordering::Relaxed) != 0)
    }

    /// When what was in flight at the last look should have landed; `None` where that is not known.
    pub fn lands_ns(&self) -> Option<u64> {
        self.0.values().filter_map(|flight| flight.lands_ns).max()
    }

    /// About what a look at all of it takes, nanoseconds: a tenant with many words is looked at less often.
    pub fn cost_ns(&self) -> u64 {
        let lanes = |flight: &Flight<P>| {
            let used = flight.page.used_lanes.iter().take(CONTEXTS);
            used.map(|used| u64::from(used.load(Ordering::Relaxed)).min(LANES as u64)).sum::<u64>()
        };
        self.0.values().map(|flight| PAGE_NS + WORD_NS * lanes(flight)).sum()
    }
}

impl<P: std::ops::Deref<Target = FlightPage>> Flight<P> {
    /// Reads the words; what is in flight.
    fn look(&mut self, now_ns: u64) -> InFlight {
        let flight = self.page.in_flight();
        let words = Words::of(&self.page, flight);
        if words.admitted != self.seen.admitted {
            (self.quiet_ns, self.lands_ns) = (None, None);
        }
        let usual_us = u64::from(self.page.usual_us.load(Ordering::Relaxed));
        let lasts_ns = flight.operations.saturating_mul(usual_us * 1000);
        // The first of them may have begun long ago: an earlier look knows better.
        let lands_ns = (lasts_ns > 0).then(|| now_ns.saturating_add(lasts_ns));
        self.lands_ns = lands_ns.map(|ns| self.lands_ns.map_or(ns, |before| before.min(ns)));
        if words != self.seen {
            (self.seen, self.still_ns) = (words, now_ns);
        }
        flight
    }

    fn has_landed(&mut self, now_ns: u64, word: u32) -> bool {
        let flight = self.look(now_ns);
        (!self.uncounted || self.seen.closed == word) && self.is_over(now_ns, flight)
    }

    /// Whether all is complete, as far as anybody will know: all that is marked has landed, and nobody is there to mark the
    /// rest.
    fn is_over(&self, now_ns: u64, flight: InFlight) -> bool {
        let usual_ns = u64::from(self.page.usual_us.load(Ordering::Relaxed)) * 1000;
        let expected = flight.unmarked.saturating_mul(2).saturating_mul(usual_ns);
        let patience = expected.clamp(STANDS_STILL_NS, STANDS_STILL_MOST_NS);
        // Of a process that marks by events its own threads alone know.
        let has_words = self.page.used_lanes.iter().any(|used| used.load(Ordering::Relaxed) != 0);
        flight.operations == 0
            || flight.operations == flight.unmarked
                && has_words
                && now_ns.saturating_sub(self.still_ns) >= patience
    }

    /// How long it had something in flight since the opening, where it has nothing now: from the first launch, as it
    /// says, or else from the opening on.
    fn used_ns(&self, now_ns: u64) -> u64 {
        if !self.uncounted && self.seen.admitted == self.opened {
            return 0;
        }
        let open_ns = now_ns.saturating_sub(self.opened_ns);
        match self.page.begun_us.load(Ordering::Relaxed) {
            0 => open_ns,
            begun_us => open_ns.min(u64::from(us(now_ns).wrapping_sub(begun_us)) * 1000),
        }
    }

    fn quiet_since(&mut self, now_ns: u64) -> Option<u64> {
        let flight = self.look(now_ns);
        if !self.is_over(now_ns, flight) {
            self.quiet_ns = None;
            return None;
        }
        let quiet_ns = *self.quiet_ns.get_or_insert(now_ns);
        // A launch that waits for room, of which there is plenty now, has a thread that sleeps, or one without a CPU.
        let waits = self.page.roomless.load(Ordering::Relaxed) != 0;
        (!waits || now_ns.saturating_sub(quiet_ns) >= WAKES_NS).then_some(quiet_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;
    /// A gate that is closed.
    const WORD: u32 = 83;

    /// One process, which counts all that it launches, at a gate that opened at 10 ms.
    fn counting(page: &FlightPage) -> Flights<&FlightPage> {
        let mut flights = Flights::default();
        flights.insert(0, 1, page);
        flights.drained(1);
        flights.opens(10 * MS);
        flights
    }

    fn launch(page: &FlightPage, operations: u64, at_ns: u64) {
        page.admitted.fetch_add(operations, Ordering::SeqCst);
        page.begun_us.store(us(at_ns), Ordering::SeqCst);
    }

    #[test]
    fn used_is_the_time_from_the_first_launch_to_the_last_completion() {
        let page = Box::new(FlightPage::unseen());
        let mut flights = counting(&page);
        launch(&page, 3, 12 * MS);
        assert_eq!(flights.landed(20 * MS, WORD), [], "three are in flight");
        page.settled.store(3, Ordering::SeqCst);
        assert_eq!(flights.landed(21 * MS, WORD), [(1, 9 * MS)]);
        flights.opens(30 * MS);
        assert_eq!(flights.landed(35 * MS, WORD), [(1, 0)], "it launched nothing");
        flights.opens(40 * MS);
        launch(&page, 1, 39 * MS);
        page.settled.store(4, Ordering::SeqCst);
        assert_eq!(flights.landed(45 * MS, WORD), [(1, 5 * MS)], "not before the opening");
        flights.opens(50 * MS);
        page.admitted.fetch_add(1, Ordering::SeqCst);
        page.begun_us.store(0, Ordering::SeqCst);
        page.settled.store(5, Ordering::SeqCst);
        assert_eq!(flights.landed(53 * MS, WORD), [(1, 3 * MS)], "it does not say");
    }

    #[test]
    fn processes_are_told_how_many_of_them_launched_in_the_last_lease() {
        let pages = [(); 3].map(|()| Box::new(FlightPage::unseen()));
        let mut flights = Flights::default();
        (1..).zip(&pages).for_each(|(process, page)| flights.insert(0, process, &**page));
        for (lease, launching) in [[1, 1, 0], [0, 1, 0], [0, 0, 0]].into_iter().zip([2, 1, 0]) {
            for (page, operations) in pages.iter().zip(lease) {
                page.admitted.fetch_add(operations, Ordering::SeqCst);
                page.settled.fetch_add(operations, Ordering::SeqCst);
            }
            flights.opens(10 * MS);
            let told = pages.each_ref().map(|page| page.launching.load(Ordering::Relaxed));
            assert_eq!(told, [launching; 3]);
        }
    }

    #[test]
    fn a_process_is_told_when_others_of_its_tenant_go_on() {
        let pages = [(); 2].map(|()| {
            let page = Box::new(FlightPage::unseen());
            page.admitted.store(3, Ordering::SeqCst);
            page
        });
        let mut flights = Flights::default();
        (1..).zip(&pages).for_each(|(process, page)| flights.insert(0, process, &**page));
        let told = || pages.each_ref().map(|page| page.elsewhere_us.load(Ordering::Relaxed));
        flights.landed(MS, WORD);
        assert_eq!(told(), [0, 0], "nobody");
        pages[0].settled.store(1, Ordering::SeqCst);
        flights.landed(2 * MS, WORD);
        assert_eq!(told(), [0, 2_000], "the first");
        pages.iter().for_each(|page| page.settled.store(3, Ordering::SeqCst));
        flights.landed(3 * MS, WORD);
        assert_eq!(told(), [3_000, 3_000], "both");
        flights.landed(4 * MS, WORD);
        assert_eq!(told(), [3_000, 3_000]);
    }

    #[test]
    fn a_process_is_told_how_far_it_is_behind_the_one_that_is_ahead() {
        let pages = [3, 0, 1].map(|admitted| {
            let page = Box::new(FlightPage::unseen());
            page.admitted.store(admitted, Ordering::SeqCst);
            page
        });
        let mut flights = Flights::default();
        (1..).zip(&pages).for_each(|(process, page)| flights.insert(0, process, &**page));
        flights.show_behind();
        assert_eq!(pages.each_ref().map(|page| page.behind.load(Ordering::Relaxed)), [0, 3, 2]);
    }

    #[test]
    fn what_nobody_marks_is_complete_when_the_words_have_stood_still() {
        let page = Box::new(FlightPage::unseen());
        let mut flights = counting(&page);
        launch(&page, 5, 11 * MS);
        page.marked.store(2, Ordering::SeqCst);
        page.used_lanes[3].store(1, Ordering::SeqCst);
        page.usual_us.store(1000, Ordering::SeqCst);
        for ms in 12..40 {
            assert_eq!(flights.landed(ms * MS, WORD), [], "two are marked, and not complete");
        }
        page.lanes[3][0].store(2, Ordering::SeqCst);
        for ms in 40..46 {
            assert_eq!(flights.landed(ms * MS, WORD), [], "three may take twice as long as usual");
        }
        page.marked.store(3, Ordering::SeqCst);
        for ms in 46..60 {
            assert_eq!(flights.landed(ms * MS, WORD), [], "it runs");
        }
        page.lanes[3][0].store(3, Ordering::SeqCst);
        assert_eq!(flights.landed(60 * MS, WORD), []);
        assert_eq!(flights.landed(64 * MS, WORD).len(), 1);
    }

    #[test]
    fn what_is_in_flight_lands_when_it_was_first_expected_to() {
        let page = Box::new(FlightPage::unseen());
        let mut flights = counting(&page);
        launch(&page, 2, 11 * MS);
        flights.landed(12 * MS, WORD);
        assert_eq!(flights.lands_ns(), None, "nobody knows how long it takes");
        page.usual_us.store(1000, Ordering::SeqCst);
        for ms in [12, 13, 15] {
            flights.landed(ms * MS, WORD);
            assert_eq!(flights.lands_ns(), Some(14 * MS), "at {ms}");
        }
        page.settled.store(1, Ordering::SeqCst);
        launch(&page, 1, 15 * MS);
        flights.quiet_since(16 * MS);
        assert_eq!(flights.lands_ns(), Some(18 * MS), "another came");
        page.settled.store(3, Ordering::SeqCst);
        flights.quiet_since(17 * MS);
        assert_eq!(flights.lands_ns(), None, "it has landed");
    }

    #[test]
    fn quiet_is_who_launches_nothing_and_has_nothing_in_flight() {
        let page = Box::new(FlightPage::unseen());
        let mut flights = counting(&page);
        assert_eq!(flights.quiet_since(12 * MS), Some(10 * MS), "it did not begin");
        launch(&page, 1, 12 * MS);
        assert_eq!(flights.quiet_since(13 * MS), None);
        page.settled.store(1, Ordering::SeqCst);
        assert_eq!(flights.quiet_since(14 * MS), Some(14 * MS));
        assert_eq!(flights.quiet_since(15 * MS), Some(14 * MS));
        launch(&page, 1, 15 * MS);
        page.settled.store(2, Ordering::SeqCst);
        assert_eq!(flights.quiet_since(16 * MS), Some(16 * MS), "it launched in between");
        launch(&page, 1, 16 * MS);
        page.roomless.store(1, Ordering::SeqCst);
        assert_eq!(flights.quiet_since(17 * MS), None, "it waits for room");
        page.settled.store(3, Ordering::SeqCst);
        assert_eq!(flights.quiet_since(18 * MS), None, "it has room since");
        assert_eq!(flights.quiet_since(19 * MS), Some(18 * MS), "its thread sleeps");
        launch(&page, 1, 19 * MS);
        page.roomless.store(0, Ordering::SeqCst);
        page.used_lanes[0].store(1, Ordering::SeqCst);
        assert_eq!(flights.quiet_since(20 * MS), None);
        assert_eq!(flights.quiet_since(22 * MS), Some(22 * MS), "nobody marks its launch");
    }

    #[test]
    fn who_has_nothing_in_flight_is_invited_and_is_ahead_with_what_it_queues() {
        let page = Box::new(FlightPage::unseen());
        let mut flights = counting(&page);
        launch(&page, 1, 11 * MS);
        assert!(!flights.invite(WORD), "something is in flight");
        page.settled.store(1, Ordering::SeqCst);
        assert!(flights.invite(WORD) && !flights.invite(WORD), "once");
        assert!(!flights.is_ahead(WORD));
        launch(&page, 2, 12 * MS);
        assert!(flights.is_ahead(WORD) && !flights.is_ahead(WORD + 8));
        flights.opens(20 * MS);
        assert_eq!(flights.quiet_since(20 * MS), None, "it is at work from the beginning");
        page.settled.store(3, Ordering::SeqCst);
        assert_eq!(flights.landed(23 * MS, WORD), [(1, 3 * MS)], "not before the opening");
    }

    #[test]
    fn awake_is_who_says_so_and_has_a_cpu() {
        let page = Box::new(FlightPage::unseen());
        let flights = counting(&page);
        let at = u64::from(u32::MAX) * 1000;
        page.awake_us.store(us(at), Ordering::SeqCst);
        page.awake.store(WORD, Ordering::SeqCst);
        for (ns, is_awake) in
            [(at, true), (at + 50_000, true), (at - 5_000, true), (at + MS, false)]
        {
            assert_eq!(flights.is_awake(ns, WORD), is_awake, "{ns}");
        }
        assert!(!flights.is_awake(at, WORD + 8));
    }
}
