//! Holders of memory of `cuMemCreate`, and when the driver lets go of it: pure bookkeeping.
//!
//! Memory lives "when all outstanding mappings to the memory are unmapped and when all outstanding
//! references to the handle are also released" (CUDA Driver API, `cuMemRelease`). So an entry counts
//! references (create, import, retain), mappings, and what else holds it: multicast bindings and
//! tiles of sparse arrays. All counts go down *after* the driver's call succeeded, so bytes come
//! back never too early; while a call is under way its entry is pinned. A handle that the driver
//! gives again says that its old memory is gone, whatever the counts.
//!
//! Each end goes to an [`Each`].

use crate::pages::{Full, List, Zeroed};
use crate::shares::Export;

/// Gets what the driver has let go of, and how it was exported.
pub(super) type Each<'a> = &'a mut dyn FnMut(Memory, Export);

/// Memory that the driver has made or imported.
#[derive(Clone, Copy, Debug)]
pub(super) struct Memory {
    /// Index of the GPU in the quota page.
    pub(super) gpu: u8,
    /// The driver's device; multicast bindings are by device.
    pub(super) device: i32,
    /// Bytes charged; 0 for imports and multicast objects.
    pub(super) bytes: u64,
    /// The mark of an import; 0 for none.
    pub(super) import: u64,
}

/// An entry that a driver call under way concerns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "it pins its entry until the call's end is reported"]
pub(super) struct Ticket(u32);

#[derive(Clone, Copy, Debug)]
struct Entry {
    used: bool,
    /// Whether the driver gave its handle to other memory: it is gone already.
    gone: bool,
    handle: u64,
    memory: Memory,
    export: Export,
    references: u32,
    /// Of these references, those whose release is under way.
    releasing: u32,
    mappings: u32,
    holds: u32,
    /// Driver calls under way.
    pinned: u32,
}

#[derive(Clone, Copy, Debug)]
struct Name {
    handle: u64,
    entry: u32,
}

#[derive(Clone, Copy, Debug)]
struct Range {
    start: u64,
    end: u64,
    entry: u32,
    /// When it was mapped, in [`Book::now`]'s time.
    time: u64,
}

#[derive(Clone, Copy, Debug)]
struct Binding {
    object: u32,
    entry: u32,
    device: i32,
    offset: u64,
    time: u64,
}

#[derive(Clone, Copy, Debug)]
struct Tile {
    /// The sparse array's handle.
    array: u64,
    /// Serial of the context that owns it.
    context: u32,
    entry: u32,
}

// SAFETY: plain data, for which all-zero bytes are a valid value (`Export` is integers).
unsafe impl Zeroed for Entry {}
// SAFETY: as above.
unsafe impl Zeroed for Name {}
// SAFETY: as above.
unsafe impl Zeroed for Range {}
// SAFETY: as above.
unsafe impl Zeroed for Binding {}
// SAFETY: as above.
unsafe impl Zeroed for Tile {}

#[derive(Debug, Default)]
pub(super) struct Book {
    entries: List<Entry>,
    vacant: List<u32>,
    /// Sorted by handle.
    names: List<Name>,
    /// Sorted by address; none overlap.
    ranges: List<Range>,
    bindings: List<Binding>,
    tiles: List<Tile>,
    clock: u64,
}

impl Book {
    /// A time, to tell what was mapped or bound before a driver call from what was since.
    pub(super) fn now(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    pub(super) fn has_tiles(&self) -> bool {
        !self.tiles.is_empty()
    }

    /// The driver has made `handle`, by create or as a multicast object.
    ///
    /// # Errors
    /// [`Full`] when the kernel has no memory for the tables: nothing was noted.
    pub(super) fn made(&mut self, handle: u64, new: Memory, each: Each<'_>) -> Result<(), Full> {
        if let Ok(at) = self.name(handle) {
            // Given again, so its old memory is gone, though we saw no end of it, or see it soon.
            let old = self.names.remove(at).entry;
            self.vanished(old, each);
        }
        self.names.make_room()?;
        let entry = self.enter(handle, new)?;
        let at = self.name(handle).unwrap_or_else(|at| at);
        self.names.insert(at, Name { handle, entry })
    }

    /// The driver has imported `handle`. True if it is memory that this process had not: then the
    /// mark in `new` is the entry's.
    pub(super) fn imported(
        &mut self,
        handle: u64,
        new: Memory,
        each: Each<'_>,
    ) -> Result<bool, Full> {
        if let Some(known) = self.named(handle).map(|entry| &mut self.entries[entry as usize])
            && known.references > known.releasing
        {
            known.references += 1;
            return Ok(false);
        }
        self.made(handle, new, each).map(|()| true)
    }

    /// A release is about to be asked for. `None`: not ours, or no reference left to release.
    pub(super) fn releasing(&mut self, handle: u64) -> Option<Ticket> {
        let index = self.named(handle)?;
        let entry = &mut self.entries[index as usize];
        if entry.references <= entry.releasing {
            return None;
        }
        entry.releasing += 1;
        entry.pinned += 1;
        Some(Ticket(index))
    }

    /// That release's end.
    pub(super) fn released(&mut self, ticket: Ticket, done: bool, each: Each<'_>) {
        let entry = &mut self.entries[ticket.0 as usize];
        entry.releasing = entry.releasing.saturating_sub(1);
        entry.references = entry.references.saturating_sub(u32::from(done));
        self.unpin(ticket, each);
    }

    /// Pins the entry of a handle for a call that is about to be made.
    pub(super) fn pin(&mut self, handle: u64) -> Option<Ticket> {
        self.named(handle).map(|entry| self.pinned(entry))
    }

    pub(super) fn pin_at(&mut self, address: u64) -> Option<Ticket> {
        self.mapped_at(address).map(|range| self.pinned(range.entry))
    }

    /// The end of a call that changed nothing.
    pub(super) fn unpin(&mut self, ticket: Ticket, each: Each<'_>) {
        self.entries[ticket.0 as usize].pinned -= 1;
        self.settle(ticket.0, each);
    }

    /// The end of a retain: one more reference.
    pub(super) fn retained(&mut self, ticket: Ticket, each: Each<'_>) {
        let entry = &mut self.entries[ticket.0 as usize];
        entry.references += u32::from(!entry.gone);
        self.unpin(ticket, each);
    }

    /// The end of a successful map. Ranges that it overlaps are gone: the driver maps nothing twice.
    pub(super) fn mapped(&mut self, ticket: Ticket, start: u64, size: u64, each: Each<'_>) {
        let end = start.saturating_add(size);
        let now = self.now();
        self.drop_ranges(start, end, &|_| true, each);
        if !self.entries[ticket.0 as usize].gone && start < end {
            // Without memory for the table it stays mapped for ever, which is the safe side.
            self.entries[ticket.0 as usize].mappings += 1;
            let at = self.ranges.partition_point(|range| range.start < start);
            let _ = self.ranges.insert(at, Range { start, end, entry: ticket.0, time: now });
        }
        self.unpin(ticket, each);
    }

    /// The driver has unmapped a range: whatever was mapped there `before` the call.
    pub(super) fn unmapped(&mut self, (start, size): (u64, u64), before: u64, each: Each<'_>) {
        let end = start.saturating_add(size);
        self.drop_ranges(start, end, &|range| range.time <= before, each);
    }

    /// `memory` is bound to the multicast object `object`; both stay pinned.
    pub(super) fn bound(
        &mut self,
        object: Ticket,
        memory: Ticket,
        device: Option<i32>,
        offset: u64,
    ) {
        let time = self.now();
        let (of, to) = (self.entries[memory.0 as usize], self.entries[object.0 as usize]);
        if !of.gone && !to.gone {
            let device = device.unwrap_or(of.memory.device);
            // As for mappings.
            self.entries[memory.0 as usize].holds += 1;
            let binding = Binding { object: object.0, entry: memory.0, device, offset, time };
            let _ = self.bindings.push(binding);
        }
    }

    /// The driver has unbound a range of `object` on `device`: whatever was bound `before` the call.
    pub(super) fn unbound(
        &mut self,
        object: u64,
        device: i32,
        (offset, size): (u64, u64),
        before: u64,
        each: Each<'_>,
    ) {
        let Some(object) = self.named(object) else { return };
        let end = offset.saturating_add(size);
        self.drop_bindings(
            &|b| {
                b.object == object
                    && b.device == device
                    && b.time <= before
                    && (offset..end).contains(&b.offset)
            },
            each,
        );
    }

    /// The driver maps a part of a sparse array onto `handle`'s memory, which counts as held until the array ends,
    /// whatever is unmapped or mapped there later.
    pub(super) fn tile(&mut self, array: u64, handle: u64, context: u32) {
        let Some(entry) = self.named(handle) else { return };
        if !self.tiles.iter().any(|tile| (tile.array, tile.entry) == (array, entry)) {
            // As for mappings.
            self.entries[entry as usize].holds += 1;
            let _ = self.tiles.push(Tile { array, context, entry });
        }
    }

    /// An array is gone, and its tiles with it.
    pub(super) fn array_ended(&mut self, array: u64, each: Each<'_>) {
        self.drop_tiles(&|tile| tile.array == array, each);
    }

    /// A context is gone, and its arrays with it.
    pub(super) fn context_ended(&mut self, context: u32, each: Each<'_>) {
        self.drop_tiles(&|tile| tile.context == context, each);
    }

    /// How the memory behind `handle` was exported, to be changed.
    pub(super) fn export_of(&mut self, handle: u64) -> Option<&mut Export> {
        self.named(handle).map(|entry| &mut self.entries[entry as usize].export)
    }

    /// How the memory mapped at `address` was exported, to be changed, and where its mapping ends.
    pub(super) fn export_at(&mut self, address: u64) -> Option<(&mut Export, u64)> {
        let range = self.mapped_at(address)?;
        Some((&mut self.entries[range.entry as usize].export, range.end))
    }

    /// Where `handle` is in the names, or would be.
    fn name(&self, handle: u64) -> Result<usize, usize> {
        self.names.binary_search_by_key(&handle, |name| name.handle)
    }

    fn named(&self, handle: u64) -> Option<u32> {
        self.name(handle).ok().map(|at| self.names[at].entry)
    }

    fn mapped_at(&self, address: u64) -> Option<Range> {
        let at = self.ranges.partition_point(|range| range.end <= address);
        self.ranges.get(at).copied().filter(|range| range.start <= address)
    }

    fn pinned(&mut self, entry: u32) -> Ticket {
        self.entries[entry as usize].pinned += 1;
        Ticket(entry)
    }

    fn enter(&mut self, handle: u64, memory: Memory) -> Result<u32, Full> {
        let entry = Entry {
            used: true,
            gone: false,
            handle,
            memory,
            export: Export::default(),
            references: 1,
            releasing: 0,
            mappings: 0,
            holds: 0,
            pinned: 0,
        };
        match self.vacant.len().checked_sub(1) {
            Some(last) => {
                let at = self.vacant.remove(last);
                self.entries[at as usize] = entry;
                Ok(at)
            }
            None => {
                self.vacant.make_room_for(self.entries.len() + 1)?;
                let at = u32::try_from(self.entries.len()).map_err(|_| Full)?;
                self.entries.push(entry).map(|()| at)
            }
        }
    }

    /// The driver let go of an entry without our seeing it.
    fn vanished(&mut self, index: u32, each: Each<'_>) {
        let pinned = self.pinned(index);
        let entry = &mut self.entries[index as usize];
        entry.gone = true;
        entry.references = 0;
        each(entry.memory, entry.export);
        self.drop_ranges(0, u64::MAX, &|range| range.entry == index, each);
        self.drop_tiles(&|tile| tile.entry == index, each);
        self.drop_bindings(&|binding| binding.entry == index || binding.object == index, each);
        self.unpin(pinned, each);
    }

    /// Ends an entry that nothing holds.
    fn settle(&mut self, index: u32, each: Each<'_>) {
        let entry = self.entries[index as usize];
        if !entry.used || entry.pinned + entry.references + entry.mappings + entry.holds > 0 {
            return;
        }
        self.entries[index as usize].used = false;
        // There is room for every entry.
        let _ = self.vacant.push(index);
        if entry.gone {
            return;
        }
        if let Ok(at) = self.name(entry.handle)
            && self.names[at].entry == index
        {
            self.names.remove(at);
        }
        each(entry.memory, entry.export);
        // A multicast object lets go of what is bound to it.
        self.drop_bindings(&|binding| binding.object == index, each);
    }

    fn drop_ranges(
        &mut self,
        start: u64,
        end: u64,
        doomed: &dyn Fn(&Range) -> bool,
        each: Each<'_>,
    ) {
        let mut at = self.ranges.partition_point(|range| range.end <= start);
        while let Some(range) = self.ranges.get(at).copied().filter(|range| range.start < end) {
            if doomed(&range) {
                self.ranges.remove(at);
                self.entries[range.entry as usize].mappings -= 1;
                self.settle(range.entry, each);
            } else {
                at += 1;
            }
        }
    }

    fn drop_bindings(&mut self, doomed: &dyn Fn(&Binding) -> bool, each: Each<'_>) {
        while let Some(binding) = self.bindings.take(doomed) {
            self.entries[binding.entry as usize].holds -= 1;
            self.settle(binding.entry, each);
        }
    }

    fn drop_tiles(&mut self, doomed: &dyn Fn(&Tile) -> bool, each: Each<'_>) {
        while let Some(tile) = self.tiles.take(doomed) {
            self.entries[tile.entry as usize].holds -= 1;
            self.settle(tile.entry, each);
        }
    }
}

#[cfg(test)]
mod tests;
