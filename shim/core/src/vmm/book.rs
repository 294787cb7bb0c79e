//! Holders of memory of `cuMemCreate`, and when the driver lets go of it: pure bookkeeping.
//!
//! Memory lives "when all outstanding mappings to the memory are unmapped and when all outstanding
//! references to the handle are also released" (CUDA Driver API, `cuMemRelease`). So an entry counts
//! references (create, import, retain), mappings, and what else holds it: multicast bindings and
//! tiles of sparse arrays. All counts go down *after* the driver's call succeeded, so bytes come
//! back never too early; while a call is under way its entry is pinned. A handle that the driver
//! gives again says that its old memory is gone, whatever the counts.
//!
//! Each end goes to an `each` closure as [`Ended`].

use super::tiles::Region;
use crate::list::{Full, List};
use crate::pages::Zeroed;
use crate::shares::Export;

/// What the driver has let go of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    /// Index of the GPU in the quota page.
    pub gpu: u8,
    /// Bytes charged; 0 for imports and multicast objects.
    pub bytes: u64,
    /// The mark of an import; 0 for none.
    pub import: u64,
    /// How it was exported.
    pub export: Export,
}

/// Memory that the driver has just made or imported.
#[derive(Clone, Copy, Debug)]
pub struct New {
    /// Index of the GPU in the quota page.
    pub gpu: u8,
    /// The driver's device; multicast bindings are by device.
    pub device: i32,
    /// Bytes charged.
    pub bytes: u64,
    /// The mark of an import; 0 for none.
    pub import: u64,
}

/// An entry that a driver call under way concerns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "it pins its entry until the call's end is reported"]
pub struct Ticket(u32);

#[derive(Clone, Copy, Debug)]
struct Entry {
    /// Whether the entry is in use.
    used: bool,
    /// Whether the driver gave its handle to other memory: it is gone already.
    gone: bool,
    gpu: u8,
    device: i32,
    handle: u64,
    bytes: u64,
    import: u64,
    export: Export,
    references: u32,
    /// Of these references, those whose release is under way.
    releasing: u32,
    mappings: u32,
    holds: u32,
    /// Driver calls under way.
    pinned: u32,
}

/// A handle's entry.
#[derive(Clone, Copy, Debug)]
struct Name {
    handle: u64,
    entry: u32,
}

/// A mapped range.
#[derive(Clone, Copy, Debug)]
struct Range {
    start: u64,
    end: u64,
    entry: u32,
    /// When it was mapped, in [`Book::now`]'s time.
    time: u64,
}

/// A multicast binding.
#[derive(Clone, Copy, Debug)]
struct Binding {
    object: u32,
    entry: u32,
    device: i32,
    offset: u64,
    time: u64,
}

/// A tile of a sparse array.
#[derive(Clone, Copy, Debug)]
struct Tile {
    region: Region,
    /// Serial of the context that owns the array.
    context: u32,
    entry: u32,
}

/// An entry that is not in use.
#[derive(Clone, Copy, Debug)]
struct Vacant(u32);

// SAFETY: plain data, for which all-zero bytes are a valid value (`Export` is integers).
unsafe impl Zeroed for Entry {}
// SAFETY: as above.
unsafe impl Zeroed for Vacant {}
// SAFETY: as above.
unsafe impl Zeroed for Name {}
// SAFETY: as above.
unsafe impl Zeroed for Range {}
// SAFETY: as above.
unsafe impl Zeroed for Binding {}
// SAFETY: as above.
unsafe impl Zeroed for Tile {}

/// All of it, for one process.
#[derive(Debug)]
pub struct Book {
    entries: List<Entry>,
    /// Entries not in use.
    vacant: List<Vacant>,
    /// Sorted by handle.
    names: List<Name>,
    /// Sorted by address; none overlap.
    ranges: List<Range>,
    bindings: List<Binding>,
    tiles: List<Tile>,
    clock: u64,
}

impl Default for Book {
    fn default() -> Self {
        Self::new()
    }
}

impl Book {
    /// Nothing yet.
    pub const fn new() -> Self {
        Self {
            entries: List::new(),
            vacant: List::new(),
            names: List::new(),
            ranges: List::new(),
            bindings: List::new(),
            tiles: List::new(),
            clock: 0,
        }
    }

    /// A time, to tell what was mapped or bound before a driver call from what was since.
    pub fn now(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// Whether any array has tiles.
    pub fn has_tiles(&self) -> bool {
        !self.tiles.is_empty()
    }

    /// The driver has made `handle`, by create or as a multicast object.
    ///
    /// # Errors
    /// [`Full`] when the kernel has no memory for the tables: nothing was noted.
    pub fn made(&mut self, handle: u64, new: New, each: &mut dyn FnMut(Ended)) -> Result<(), Full> {
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
    ///
    /// # Errors
    /// As [`Book::made`].
    pub fn imported(
        &mut self,
        handle: u64,
        new: New,
        each: &mut dyn FnMut(Ended),
    ) -> Result<bool, Full> {
        if let Some(known) = self.find(handle)
            && known.references > known.releasing
        {
            known.references += 1;
            return Ok(false);
        }
        self.made(handle, new, each).map(|()| true)
    }

    /// A release is about to be asked for. `None`: not ours, or no reference left to release.
    pub fn releasing(&mut self, handle: u64) -> Option<Ticket> {
        let at = self.name(handle).ok()?;
        let index = self.names[at].entry;
        let entry = &mut self.entries[index as usize];
        if entry.references <= entry.releasing {
            return None;
        }
        entry.releasing += 1;
        entry.pinned += 1;
        Some(Ticket(index))
    }

    /// That release's end.
    pub fn released(&mut self, ticket: Ticket, done: bool, each: &mut dyn FnMut(Ended)) {
        let entry = &mut self.entries[ticket.0 as usize];
        entry.releasing = entry.releasing.saturating_sub(1);
        entry.references = entry.references.saturating_sub(u32::from(done));
        self.unpin(ticket, each);
    }

    /// Pins the entry of a handle for a call that is about to be made.
    pub fn pin(&mut self, handle: u64) -> Option<Ticket> {
        let at = self.name(handle).ok()?;
        Some(self.pinned(self.names[at].entry))
    }

    /// Pins the entry that is mapped at `address`.
    pub fn pin_at(&mut self, address: u64) -> Option<Ticket> {
        let at = self.ranges.partition_point(|range| range.end <= address);
        let range = self.ranges.get(at).filter(|range| range.start <= address)?;
        let entry = range.entry;
        Some(self.pinned(entry))
    }

    /// The end of a call that changed nothing.
    pub fn unpin(&mut self, ticket: Ticket, each: &mut dyn FnMut(Ended)) {
        self.entries[ticket.0 as usize].pinned -= 1;
        self.settle(ticket.0, each);
    }

    /// The end of a retain: one more reference.
    pub fn retained(&mut self, ticket: Ticket, each: &mut dyn FnMut(Ended)) {
        let entry = &mut self.entries[ticket.0 as usize];
        entry.references += u32::from(!entry.gone);
        self.unpin(ticket, each);
    }

    /// The end of a successful map. Ranges that it overlaps are gone: the driver maps nothing twice.
    pub fn mapped(&mut self, ticket: Ticket, start: u64, size: u64, each: &mut dyn FnMut(Ended)) {
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
    pub fn unmapped(&mut self, start: u64, size: u64, before: u64, each: &mut dyn FnMut(Ended)) {
        let end = start.saturating_add(size);
        self.drop_ranges(start, end, &|range| range.time <= before, each);
    }

    /// The end of a successful bind of `memory` to the multicast object `object`.
    pub fn bound(
        &mut self,
        object: Ticket,
        memory: Ticket,
        device: Option<i32>,
        offset: u64,
        each: &mut dyn FnMut(Ended),
    ) {
        let time = self.now();
        let (of, to) = (self.entries[memory.0 as usize], self.entries[object.0 as usize]);
        if !of.gone && !to.gone {
            let device = device.unwrap_or(of.device);
            // As for mappings.
            self.entries[memory.0 as usize].holds += 1;
            let binding = Binding { object: object.0, entry: memory.0, device, offset, time };
            let _ = self.bindings.push(binding);
        }
        self.unpin(memory, each);
        self.unpin(object, each);
    }

    /// The driver has unbound a range of `object` on `device`: whatever was bound `before` the call.
    pub fn unbound(
        &mut self,
        object: u64,
        device: i32,
        (offset, size): (u64, u64),
        before: u64,
        each: &mut dyn FnMut(Ended),
    ) {
        let Ok(at) = self.name(object) else { return };
        let object = self.names[at].entry;
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

    /// The driver maps a part of a sparse array onto `handle`'s memory, or unmaps it (`None`).
    pub fn tile(
        &mut self,
        region: Region,
        handle: Option<u64>,
        context: u32,
        each: &mut dyn FnMut(Ended),
    ) {
        // The new one first: it may be the memory's own tile that it replaces.
        let entry = handle.and_then(|handle| self.name(handle).ok());
        let entry = entry.map(|at| self.names[at].entry);
        if let Some(entry) = entry {
            self.entries[entry as usize].pinned += 1;
        }
        let mut at = 0;
        while at < self.tiles.len() {
            if !region.touches(&self.tiles[at].region) {
                at += 1;
                continue;
            }
            let old = self.tiles.remove(at);
            for rest in old.region.without(&region) {
                self.hold_tile(Tile { region: rest, ..old }, 0);
            }
            self.entries[old.entry as usize].holds -= 1;
            self.settle(old.entry, each);
        }
        if let Some(entry) = entry {
            self.hold_tile(Tile { region, context, entry }, self.tiles.len());
            self.unpin(Ticket(entry), each);
        }
    }

    /// Notes a tile at `at`, which keeps the order of those not looked at yet.
    fn hold_tile(&mut self, tile: Tile, at: usize) {
        // As for mappings.
        self.entries[tile.entry as usize].holds += 1;
        let _ = self.tiles.insert(at, tile);
    }

    /// An array is gone, and its tiles with it.
    pub fn array_ended(&mut self, resource: u64, each: &mut dyn FnMut(Ended)) {
        self.drop_tiles(&|tile| tile.region.resource == resource, each);
    }

    /// A context is gone, and its arrays with it.
    pub fn context_ended(&mut self, context: u32, each: &mut dyn FnMut(Ended)) {
        self.drop_tiles(&|tile| tile.context == context, each);
    }

    /// How the memory behind `handle` was exported, to be changed.
    pub fn export_of(&mut self, handle: u64) -> Option<&mut Export> {
        self.find(handle).map(|entry| &mut entry.export)
    }

    /// How the memory mapped at `address` was exported, to be changed, and where its mapping ends.
    pub fn export_at(&mut self, address: u64) -> Option<(&mut Export, u64)> {
        let at = self.ranges.partition_point(|range| range.end <= address);
        let range = self.ranges.get(at).filter(|range| range.start <= address)?;
        let (entry, end) = (range.entry, range.end);
        Some((&mut self.entries[entry as usize].export, end))
    }

    /// Where `handle` is in the names, or would be.
    fn name(&self, handle: u64) -> Result<usize, usize> {
        self.names.binary_search_by_key(&handle, |name| name.handle)
    }

    fn find(&mut self, handle: u64) -> Option<&mut Entry> {
        let at = self.name(handle).ok()?;
        let entry = self.names[at].entry;
        Some(&mut self.entries[entry as usize])
    }

    fn pinned(&mut self, entry: u32) -> Ticket {
        self.entries[entry as usize].pinned += 1;
        Ticket(entry)
    }

    fn enter(&mut self, handle: u64, new: New) -> Result<u32, Full> {
        let entry = Entry {
            used: true,
            gone: false,
            gpu: new.gpu,
            device: new.device,
            handle,
            bytes: new.bytes,
            import: new.import,
            export: Export::default(),
            references: 1,
            releasing: 0,
            mappings: 0,
            holds: 0,
            pinned: 0,
        };
        match self.vacant.len().checked_sub(1) {
            Some(last) => {
                let at = self.vacant.remove(last).0;
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
    fn vanished(&mut self, index: u32, each: &mut dyn FnMut(Ended)) {
        let pinned = self.pinned(index);
        let entry = &mut self.entries[index as usize];
        entry.gone = true;
        entry.references = 0;
        each(entry.ended());
        self.drop_ranges(0, u64::MAX, &|range| range.entry == index, each);
        self.drop_tiles(&|tile| tile.entry == index, each);
        self.drop_bindings(&|binding| binding.entry == index || binding.object == index, each);
        self.unpin(pinned, each);
    }

    /// Ends an entry that nothing holds.
    fn settle(&mut self, index: u32, each: &mut dyn FnMut(Ended)) {
        let entry = self.entries[index as usize];
        if !entry.used || entry.pinned + entry.references + entry.mappings + entry.holds > 0 {
            return;
        }
        self.entries[index as usize].used = false;
        // There is room for every entry.
        let _ = self.vacant.push(Vacant(index));
        if entry.gone {
            return;
        }
        if let Ok(at) = self.name(entry.handle)
            && self.names[at].entry == index
        {
            self.names.remove(at);
        }
        each(entry.ended());
        // A multicast object lets go of what is bound to it.
        self.drop_bindings(&|binding| binding.object == index, each);
    }

    fn drop_ranges(
        &mut self,
        start: u64,
        end: u64,
        doomed: &dyn Fn(&Range) -> bool,
        each: &mut dyn FnMut(Ended),
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

    fn drop_bindings(&mut self, doomed: &dyn Fn(&Binding) -> bool, each: &mut dyn FnMut(Ended)) {
        while let Some(binding) = self.bindings.take(doomed) {
            self.entries[binding.entry as usize].holds -= 1;
            self.settle(binding.entry, each);
        }
    }

    fn drop_tiles(&mut self, doomed: &dyn Fn(&Tile) -> bool, each: &mut dyn FnMut(Ended)) {
        while let Some(tile) = self.tiles.take(doomed) {
            self.entries[tile.entry as usize].holds -= 1;
            self.settle(tile.entry, each);
        }
    }
}

impl Entry {
    fn ended(&self) -> Ended {
        Ended { gpu: self.gpu, bytes: self.bytes, import: self.import, export: self.export }
    }
}

#[cfg(test)]
mod tests;
