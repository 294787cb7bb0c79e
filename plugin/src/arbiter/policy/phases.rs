//! Where each tenant's part of the autonomous cycle begins, for the time without an arbiter.

use super::types::{GpuIndex, MAX_GPUS};

/// Thousandths of a cycle.
const CYCLE: u64 = 1000;

/// The start of each tenant's part, in thousandths of the cycle, in the order given: a tenant has
/// its GPUs and its share in thousandths. A gang has one start for all its GPUs, because all its
/// gates are one.
///
/// On each GPU parts do not overlap while the shares there sum to at most 1000; where they sum to
/// more, the starts are spread in proportion, so that everybody overlaps about as much. Gangs that
/// share some but not all of their GPUs may leave gaps, and then parts may overlap sooner.
#[must_use]
pub fn phases(tenants: &[(&[GpuIndex], u32)]) -> Vec<u32> {
    let gpus =
        |i: usize| tenants[i].0.iter().map(|&gpu| usize::from(gpu)).filter(|&g| g < MAX_GPUS);
    let mut order: Vec<usize> = (0..tenants.len()).collect();
    // Gangs first: they need the same room on all their GPUs. The others fill what is left.
    order.sort_by_key(|&i| (std::cmp::Reverse(tenants[i].0.len()), i));
    let mut filled = [0_u64; MAX_GPUS];
    let mut starts = vec![0_u64; tenants.len()];
    for &i in &order {
        let start = gpus(i).map(|gpu| filled[gpu]).max().unwrap_or(0);
        starts[i] = start;
        for gpu in gpus(i) {
            filled[gpu] = start + u64::from(tenants[i].1);
        }
    }
    let scaled = |i: usize| {
        let most = gpus(i).map(|gpu| filled[gpu]).max().unwrap_or(0);
        let start = if most > CYCLE { starts[i] * CYCLE / most } else { starts[i] };
        u32::try_from(start % CYCLE).unwrap_or(0)
    };
    (0..tenants.len()).map(scaled).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_follow_each_other_while_they_fit() {
        assert_eq!(phases(&[(&[0], 300), (&[0], 500), (&[1], 700), (&[0], 200)]), [0, 300, 0, 800]);
    }

    #[test]
    fn a_gang_has_one_start_and_its_neighbours_stay_out_of_it() {
        let starts = phases(&[(&[0], 500), (&[1], 600), (&[0, 1], 400)]);
        assert_eq!(starts, [400, 400, 0]);
    }

    #[test]
    fn parts_that_do_not_fit_are_spread_evenly() {
        assert_eq!(phases(&[(&[0], 1000), (&[0], 1000)]), [0, 500]);
        assert_eq!(phases(&[(&[0][..], 500); 4]), [0, 250, 500, 750]);
    }

    #[test]
    fn nonsense_gets_some_answer() {
        assert_eq!(phases(&[(&[], 5), (&[255], u32::MAX), (&[0, 0], 0)]), [0, 0, 0]);
    }
}
