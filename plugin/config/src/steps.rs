//! How much of a text was looked at, for tests that compare it: time says little on a busy machine.

#[cfg(test)]
thread_local! {
    static STEPS: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// So many bytes, keys or problems are looked at. Every loop over what a file has many of says so.
#[inline]
pub(super) fn count(_steps: usize) {
    #[cfg(test)]
    STEPS.set(STEPS.get() + _steps);
}

/// How many steps this takes.
#[cfg(test)]
pub(super) fn of(what: impl FnOnce()) -> usize {
    let before = STEPS.get();
    what();
    STEPS.get() - before
}
