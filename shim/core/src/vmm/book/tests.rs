use super::*;
use proptest::prelude::*;
use std::collections::BTreeMap;

fn new(bytes: u64) -> Memory {
    Memory { gpu: 0, device: 0, bytes, import: 0 }
}

/// Runs an act on the book and says how many bytes ended by it.
fn ending(book: &mut Book, act: impl FnOnce(&mut Book, Each<'_>)) -> u64 {
    let mut bytes = 0;
    act(book, &mut |memory, _| bytes += memory.bytes);
    bytes
}

fn make(book: &mut Book, handle: u64, bytes: u64) -> u64 {
    ending(book, |book, each| book.made(handle, new(bytes), each).expect("memory"))
}

fn release(book: &mut Book, handle: u64) -> u64 {
    let ticket = book.releasing(handle).expect("a reference");
    ending(book, |book, each| book.released(ticket, true, each))
}

fn unmap(book: &mut Book, start: u64, size: u64) -> u64 {
    let before = book.now();
    ending(book, |book, each| book.unmapped((start, size), before, each))
}

#[test]
fn bindings_hold_until_they_or_their_object_end() {
    for unbind in [true, false] {
        let mut book = Book::default();
        make(&mut book, 1, 10);
        make(&mut book, 9, 0);
        let (object, memory) = (book.pin(9).expect("known"), book.pin(1).expect("known"));
        book.bound(object, memory, None, 64);
        for ticket in [memory, object] {
            assert_eq!(ending(&mut book, |book, each| book.unpin(ticket, each)), 0);
        }
        assert_eq!(release(&mut book, 1), 0, "it is bound");
        if unbind {
            let before = book.now();
            for (device, offset, ends) in [(1, 64, 0), (0, 0, 0), (0, 64, 10)] {
                let range = (offset, 64);
                let ended = ending(&mut book, |book, each| {
                    book.unbound(9, device, range, before, each);
                });
                assert_eq!(ended, ends, "device {device}, offset {offset}");
            }
            assert_eq!(release(&mut book, 9), 0);
        } else {
            assert_eq!(release(&mut book, 9), 10);
        }
    }
}

#[test]
fn a_tile_holds_until_its_array_or_context_ends() {
    let mut book = Book::default();
    for (handle, array, context) in [(1, 5, 3), (2, 5, 3), (3, 6, 4)] {
        make(&mut book, handle, 10 * handle);
        (0..2).for_each(|_| book.tile(array, handle, context));
        assert_eq!(release(&mut book, handle), 0, "it backs a tile");
    }
    assert_eq!(ending(&mut book, |book, each| book.array_ended(5, each)), 30);
    assert_eq!(ending(&mut book, |book, each| book.context_ended(4, each)), 30);
    assert!(!book.has_tiles());
}

#[test]
fn an_import_of_what_is_here_already_is_one_more_reference() {
    let mut book = Book::default();
    make(&mut book, 1, 10);
    let import = Memory { import: 77, ..new(0) };
    let mut none = |_, _| panic!("nothing ends");
    assert_eq!(book.imported(1, import, &mut none), Ok(false));
    assert_eq!(book.imported(2, import, &mut none), Ok(true));
    assert_eq!((release(&mut book, 1), release(&mut book, 1)), (0, 10));
    let mut marks = Vec::new();
    let ticket = book.releasing(2).expect("a reference");
    book.released(ticket, true, &mut |memory, _| marks.push(memory.import));
    assert_eq!(marks, [77]);
}

/// A driver by the manual: handles are reused as soon as they can be.
#[derive(Default)]
struct Driver {
    memory: BTreeMap<u64, Real>,
    mapped: BTreeMap<u64, u64>,
}

#[derive(Clone, Copy)]
struct Real {
    bytes: u64,
    references: u32,
    mappings: u32,
}

impl Driver {
    fn total(&self) -> u64 {
        self.memory.values().map(|real| real.bytes).sum()
    }

    fn settle(&mut self, handle: u64) {
        if self.memory.get(&handle).is_some_and(|r| r.references + r.mappings == 0) {
            self.memory.remove(&handle);
        }
    }

    fn create(&mut self, bytes: u64) -> u64 {
        let handle = (1..).find(|handle| !self.memory.contains_key(handle)).expect("endless");
        self.memory.insert(handle, Real { bytes, references: 1, mappings: 0 });
        handle
    }

    fn release(&mut self, handle: u64) -> bool {
        let Some(real) = self.memory.get_mut(&handle).filter(|real| real.references > 0) else {
            return false;
        };
        real.references -= 1;
        self.settle(handle);
        true
    }

    fn map(&mut self, handle: u64, page: u64) -> bool {
        if self.mapped.contains_key(&page) {
            return false;
        }
        let Some(real) = self.memory.get_mut(&handle).filter(|real| real.references > 0) else {
            return false;
        };
        real.mappings += 1;
        self.mapped.insert(page, handle);
        true
    }

    /// All or nothing: the whole range must be mapped.
    fn unmap(&mut self, first: u64, pages: u64) -> bool {
        if !(first..first + pages).all(|page| self.mapped.contains_key(&page)) {
            return false;
        }
        for page in first..first + pages {
            let handle = self.mapped.remove(&page).expect("looked at");
            self.memory.get_mut(&handle).expect("it is mapped").mappings -= 1;
            self.settle(handle);
        }
        true
    }
}

/// A call between the hook's first and second half.
enum Call {
    Release { ticket: Option<Ticket>, done: bool },
    Map { ticket: Option<Ticket>, page: u64, done: bool },
    Unmap { first: u64, pages: u64, before: u64, done: bool },
    Retain { ticket: Option<Ticket>, handle: u64, done: bool },
}

/// Whether a map of one of these pages is under way: nobody may use them yet.
fn being_mapped(calls: &[Call], pages: core::ops::Range<u64>) -> bool {
    calls.iter().any(|call| matches!(call, Call::Map { page, .. } if pages.contains(page)))
}

/// References to `handle` that nobody has been given yet.
fn being_retained(calls: &[Call], handle: u64) -> u32 {
    let retains = |call: &&Call| matches!(call, Call::Retain { handle: of, .. } if *of == handle);
    u32::try_from(calls.iter().filter(retains).count()).expect("few")
}

#[derive(Clone, Debug)]
enum Act {
    Create(u64),
    Release(u64),
    Map(u64, u64),
    Unmap(u64, u64),
    Retain(u64),
    /// The second half of one that is under way.
    Finish(prop::sample::Index),
}

fn act() -> impl Strategy<Value = Act> {
    let (handle, page) = (1u64..6, 0u64..8);
    prop_oneof![
        3 => (1u64..100).prop_map(Act::Create),
        4 => handle.clone().prop_map(Act::Release),
        4 => (handle, page.clone()).prop_map(|(handle, page)| Act::Map(handle, page)),
        4 => (page.clone(), 1u64..4).prop_map(|(first, pages)| Act::Unmap(first, pages)),
        2 => page.prop_map(Act::Retain),
        14 => any::<prop::sample::Index>().prop_map(Act::Finish),
    ]
}

const PAGE: u64 = 4096;

fn finish(book: &mut Book, call: Call) -> u64 {
    ending(book, |book, each| match call {
        Call::Release { ticket: Some(ticket), done } => book.released(ticket, done, each),
        Call::Map { ticket: Some(ticket), page, done: true } => {
            book.mapped(ticket, page * PAGE, PAGE, each);
        }
        Call::Retain { ticket: Some(ticket), done: true, .. } => book.retained(ticket, each),
        Call::Map { ticket: Some(ticket), .. } | Call::Retain { ticket: Some(ticket), .. } => {
            book.unpin(ticket, each);
        }
        Call::Unmap { first, pages, before, done: true } => {
            book.unmapped((first * PAGE, pages * PAGE), before, each);
        }
        Call::Release { .. } | Call::Map { .. } | Call::Unmap { .. } | Call::Retain { .. } => {}
    })
}

proptest! {
    #[test]
    fn calls_of_many_threads_give_back_what_the_driver_lets_go_and_never_before(
        acts in prop::collection::vec(act(), 1..400),
    ) {
        let (mut book, mut driver) = (Book::default(), Driver::default());
        let (mut charged, mut under_way) = (0u64, Vec::<Call>::new());
        for act in acts {
            match act {
                // Reserved before the driver is called, so it is charged in time.
                Act::Create(bytes) => {
                    let handle = driver.create(bytes);
                    charged += bytes;
                    charged -= make(&mut book, handle, bytes);
                }
                Act::Release(handle) => {
                    // What the driver has no reference of is the application's fault.
                    let unknown = being_retained(&under_way, handle);
                    if driver.memory.get(&handle).is_some_and(|real| real.references > unknown) {
                        let ticket = book.releasing(handle);
                        let done = driver.release(handle);
                        under_way.push(Call::Release { ticket, done });
                    }
                }
                Act::Map(handle, page) => {
                    let ticket = book.pin(handle);
                    let done = driver.map(handle, page);
                    under_way.push(Call::Map { ticket, page, done });
                }
                Act::Unmap(first, pages) => {
                    // An application unmaps what it knows to be mapped.
                    if !being_mapped(&under_way, first..first + pages) {
                        let before = book.now();
                        let done = driver.unmap(first, pages);
                        under_way.push(Call::Unmap { first, pages, before, done });
                    }
                }
                Act::Retain(page) => {
                    if let Some(&handle) = driver.mapped.get(&page)
                        && !being_mapped(&under_way, page..page + 1)
                    {
                        let ticket = book.pin_at(page * PAGE);
                        driver.memory.get_mut(&handle).expect("it is mapped").references += 1;
                        under_way.push(Call::Retain { ticket, handle, done: true });
                    }
                }
                Act::Finish(which) => {
                    if !under_way.is_empty() {
                        let call = under_way.swap_remove(which.index(under_way.len()));
                        charged -= finish(&mut book, call);
                    }
                }
            }
            prop_assert!(charged >= driver.total(), "{charged} of {}", driver.total());
        }
        for call in under_way {
            charged -= finish(&mut book, call);
        }
        prop_assert_eq!(charged, driver.total());
        // And all of it ends.
        for page in 0..8 {
            if driver.unmap(page, 1) {
                charged -= unmap(&mut book, page * PAGE, PAGE);
            }
        }
        while let Some(&handle) = driver.memory.keys().next() {
            driver.release(handle);
            charged -= release(&mut book, handle);
        }
        prop_assert_eq!(charged, 0);
        prop_assert!(book.names.is_empty() && book.ranges.is_empty());
        prop_assert_eq!(book.vacant.len(), book.entries.len());
    }
}
