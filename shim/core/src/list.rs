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
pub(crate) struct List<T: Zeroed + Copy> {
    table: Option<Table<T>>,
    len: usize,
    /// Places beyond `len` that are kept free.
    promised: usize,
}

impl<T: Zeroed + Copy> Default for List<T> {
    fn default() -> Self {
        Self { table: None, len: 0, promised: 0 }
    }
}

impl<T: Zeroed + Copy> List<T> {
    /// Makes room for one more, so that the next insertion cannot fail.
    pub(crate) fn make_room(&mut self) -> Result<(), Full> {
        self.make_room_for(self.len + 1)
    }

    /// Makes room for `wanted` values in all.
    pub(crate) fn make_room_for(&mut self, wanted: usize) -> Result<(), Full> {
        let wanted = wanted + self.promised;
        let capacity = self.table.as_ref().map_or(0, |table| table.as_slice().len());
        if wanted <= capacity {
            return Ok(());
        }
        let mut grown = Table::new(wanted.next_power_of_two().max(FIRST)).ok_or(Full)?;
        grown.as_mut_slice()[..self.len].copy_from_slice(self);
        self.table = Some(grown);
        Ok(())
    }

    /// Keeps a place free for a value that is about to come, until [`List::redeem`].
    pub(crate) fn promise(&mut self) -> Result<(), Full> {
        self.make_room()?;
        self.promised += 1;
        Ok(())
    }

    /// Takes the first value that `doomed` names, which may come back: its place is kept as by
    /// [`List::promise`].
    pub(crate) fn lend(&mut self, doomed: impl FnMut(&T) -> bool) -> Option<T> {
        let value = self.take(doomed)?;
        self.promised += 1;
        Some(value)
    }

    /// The end of a promise: its value, if one has come.
    pub(crate) fn redeem(&mut self, value: Option<T>) {
        self.promised -= 1;
        if let Some(value) = value {
            // Its place was kept.
            let _ = self.push(value);
        }
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

impl<T: Zeroed + Copy> Deref for List<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        self.table.as_ref().map_or(&[], |table| &table.as_slice()[..self.len])
    }
}

impl<T: Zeroed + Copy> DerefMut for List<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        let len = self.len;
        self.table.as_mut().map_or(&mut [], |table| &mut table.as_mut_slice()[..len])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pages::failing_from_now_on;

    #[test]
    fn behaves_as_a_vector() {
        let (mut list, mut model) = (List::<u32>::default(), Vec::new());
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

    #[test]
    fn what_is_lent_or_promised_finds_its_place_whatever_came_meanwhile() {
        let mut list = List::default();
        (0..64).for_each(|value: u32| list.push(value).expect("memory"));
        let lent = list.lend(|value| *value == 1);
        failing_from_now_on(|| {
            assert_eq!((list.push(100), list.promise()), (Err(Full), Err(Full)), "it is kept");
            list.redeem(lent);
        });
        assert!((0..64).all(|value| list.contains(&value)));
        assert_eq!(list.lend(|value| *value == 1), Some(1));
        list.redeem(None);
        failing_from_now_on(|| {
            assert_eq!(list.promise(), Ok(()));
            assert_eq!(list.push(100), Err(Full));
            list.redeem(Some(100));
        });
    }
}
