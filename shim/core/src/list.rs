//! A growing array of plain values on memory straight from the kernel: for tables that hooks search
//! but seldom change, and that must not recurse into the host's allocator.

use crate::pages::{Table, Zeroed};
use core::ops::{Deref, DerefMut};

/// Values of the first table.
const FIRST: usize = 64;

/// No memory for the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

/// See the module.
#[derive(Debug)]
pub(crate) struct List<T: Zeroed> {
    table: Option<Table<T>>,
    len: usize,
}

impl<T: Zeroed> List<T> {
    /// Empty; takes no memory until the first insertion.
    pub(crate) const fn new() -> Self {
        Self { table: None, len: 0 }
    }

    /// Makes room for one more, so that the next insertion cannot fail.
    pub(crate) fn make_room(&mut self) -> Result<(), Full> {
        self.make_room_for(self.len + 1)
    }

    /// Makes room for `wanted` values in all.
    pub(crate) fn make_room_for(&mut self, wanted: usize) -> Result<(), Full> {
        let capacity = self.table.as_ref().map_or(0, |table| table.as_slice().len());
        if wanted <= capacity {
            return Ok(());
        }
        let mut grown = Table::new(wanted.next_power_of_two().max(FIRST)).ok_or(Full)?;
        grown.as_mut_slice()[..self.len].copy_from_slice(self);
        self.table = Some(grown);
        Ok(())
    }

    /// Puts `value` at `at`, moving what follows up.
    pub(crate) fn insert(&mut self, at: usize, value: T) -> Result<(), Full> {
        self.make_room()?;
        let len = self.len;
        if let Some(table) = &mut self.table {
            let values = table.as_mut_slice();
            values.copy_within(at..len, at + 1);
            values[at] = value;
            self.len += 1;
        }
        Ok(())
    }

    /// Appends `value`.
    pub(crate) fn push(&mut self, value: T) -> Result<(), Full> {
        self.insert(self.len, value)
    }

    /// Takes the value at `at` out, moving what follows down.
    pub(crate) fn remove(&mut self, at: usize) -> T {
        let value = self[at];
        self.copy_within(at + 1.., at);
        self.len -= 1;
        value
    }

    /// Takes the first value that `doomed` names.
    pub(crate) fn take(&mut self, doomed: impl FnMut(&T) -> bool) -> Option<T> {
        self.iter().position(doomed).map(|at| self.remove(at))
    }
}

impl<T: Zeroed> Deref for List<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        self.table.as_ref().map_or(&[], |table| &table.as_slice()[..self.len])
    }
}

impl<T: Zeroed> DerefMut for List<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        let len = self.len;
        self.table.as_mut().map_or(&mut [], |table| &mut table.as_mut_slice()[..len])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // SAFETY: an integer.
    unsafe impl Zeroed for u32 {}

    #[test]
    fn behaves_as_a_vector() {
        let (mut list, mut model) = (List::<u32>::new(), Vec::new());
        assert!(list.is_empty() && list.take(|_| true).is_none());
        for value in 0..300 {
            let at = usize::try_from(value).expect("small") / 3;
            assert_eq!(list.insert(at, value), Ok(()));
            model.insert(at, value);
        }
        assert_eq!(&*list, &*model);
        for at in [299, 0, 100, 50] {
            assert_eq!(list.remove(at), model.remove(at));
        }
        assert_eq!(list.take(|value| *value == 7), Some(7));
        model.retain(|value| *value != 7);
        assert_eq!(&*list, &*model);
    }
}
