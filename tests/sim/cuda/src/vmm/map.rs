//! Reserving addresses, mapping memory at them, and access to it.

use super::{Mapping, Vmm, granularity};
use crate::driver::Driver;
use crate::errors::Result;
use crate::pool::props::{Location, RawAccess};
use crate::shared;
use tessera_cuda::types::{
    CUDA_ERROR_INVALID_DEVICE, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_OUT_OF_MEMORY,
};

const PAGE: u64 = 4096;

impl Vmm {
    /// Reserves addresses without memory, at the hint if that is free.
    pub(super) fn reserve(
        &mut self,
        driver: &Driver,
        len: u64,
        align: u64,
        hint: u64,
    ) -> Result<u64> {
        let wrong = len == 0
            || !len.is_multiple_of(PAGE)
            || !hint.is_multiple_of(PAGE)
            || align != 0 && !align.is_power_of_two();
        if wrong {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        if len >= 1 << 46 {
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        let align = align.max(granularity(driver));
        let want = len.checked_add(align).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        let at = |len: u64, hint: u64| {
            // SAFETY: fresh reserved addresses, without MAP_FIXED.
            let at = unsafe {
                libc::mmap(
                    hint as *mut libc::c_void,
                    usize::try_from(len).unwrap_or(usize::MAX),
                    libc::PROT_NONE,
                    libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                    -1,
                    0,
                )
            };
            (at != libc::MAP_FAILED).then_some(at as u64)
        };
        if hint != 0 && hint.is_multiple_of(align) {
            match at(len, hint) {
                Some(start) if start == hint => {
                    self.reserved.insert(start, len);
                    return Ok(start);
                }
                Some(elsewhere) => shared::unmap(elsewhere, len),
                None => {}
            }
        }
        let from = at(want, 0).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        let start = from.next_multiple_of(align);
        if start > from {
            shared::unmap(from, start - from);
        }
        if start + len < from + want {
            shared::unmap(start + len, from + want - start - len);
        }
        self.reserved.insert(start, len);
        Ok(start)
    }

    /// "The size must match what was given to memAddressReserve and the ptr given must match".
    pub(super) fn unreserve(&mut self, start: u64, len: u64) -> Result<()> {
        let in_use = self.mapped.range(start..start.saturating_add(len)).next().is_some();
        if self.reserved.get(&start) != Some(&len) || in_use {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        self.reserved.remove(&start);
        shared::unmap(start, len);
        Ok(())
    }

    pub(super) fn map(
        &mut self,
        driver: &Driver,
        start: u64,
        len: u64,
        offset: u64,
        handle: u64,
    ) -> Result<()> {
        let grain = granularity(driver);
        let aligned = [start, len, offset].iter().all(|n| n.is_multiple_of(grain));
        let end = start.checked_add(len).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        // "Note: currently must be zero" (offset).
        if len == 0 || !aligned || offset != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let inside = self.reserved.range(..=start).next_back().is_some_and(|(s, n)| end <= s + n);
        let taken = self.mapped.range(..end).next_back().is_some_and(|(s, m)| s + m.len > start);
        let memory = self.get(handle)?;
        let usable = memory.multicast.as_ref().is_none_or(super::multicast::Team::is_complete);
        if !inside || taken || len > memory.bytes || !usable {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        if !shared::map_again(memory.home, len, start) {
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        memory.uses += 1;
        let device = memory.device;
        self.mapped.insert(start, Mapping { len, handle });
        driver.memory().insert_mapped(start, len, device);
        Ok(())
    }

    /// The mappings that exactly make up a range.
    fn exactly(&self, start: u64, len: u64) -> Result<Vec<u64>> {
        let end = start.checked_add(len).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let mut at = start;
        let mut found = Vec::new();
        while at < end {
            let mapping = self.mapped.get(&at).ok_or(CUDA_ERROR_INVALID_VALUE)?;
            found.push(at);
            at += mapping.len;
        }
        if at == end && len > 0 { Ok(found) } else { Err(CUDA_ERROR_INVALID_VALUE) }
    }

    /// "The range must be the entire contiguous address range that was mapped to."
    pub(super) fn unmap(&mut self, driver: &Driver, start: u64, len: u64) -> Result<()> {
        for at in self.exactly(start, len)? {
            let Some(mapping) = self.mapped.remove(&at) else { continue };
            driver.memory().remove_mapped(at);
            shared::replace(at, mapping.len, false);
            self.unuse(driver, mapping.handle);
        }
        Ok(())
    }

    /// "The range must be a fully mapped address range containing all allocations".
    pub(super) fn set_access(
        &mut self,
        driver: &'static Driver,
        start: u64,
        len: u64,
        wanted: &[RawAccess],
    ) -> Result<()> {
        let mappings = self.exactly(start, len)?;
        for w in wanted {
            if !matches!(w.flags, 0 | 1 | 3) {
                return Err(CUDA_ERROR_INVALID_VALUE);
            }
            let place = Location::of(w.location, driver)?;
            for at in &mappings {
                let memory = self.mapped.get(at).and_then(|m| self.memory.get(&m.handle));
                let memory = memory.ok_or(CUDA_ERROR_INVALID_VALUE)?;
                match (place, memory.device) {
                    // The devices are no peers.
                    (Location::Device(d), Some(own))
                        if d != own.ordinal && memory.multicast.is_none() =>
                    {
                        return Err(CUDA_ERROR_INVALID_DEVICE);
                    }
                    (Location::Device(_), _) | (Location::Host | Location::HostNuma(_), None) => {}
                    _ => return Err(CUDA_ERROR_INVALID_VALUE),
                }
            }
        }
        for at in mappings {
            let most = wanted.iter().map(|w| w.flags).max().unwrap_or(0);
            driver.memory().set_mapped_access(at, most);
        }
        Ok(())
    }

    pub(super) fn at(&self, address: u64) -> Option<(u64, &Mapping)> {
        let (&start, mapping) = self.mapped.range(..=address).next_back()?;
        (address < start + mapping.len).then_some((start, mapping))
    }
}
