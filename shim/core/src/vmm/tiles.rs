//! Which parts of sparse arrays are backed by which memory: boxes of texels, cut where something
//! else is mapped over them or unmapped (CUDA Driver API, `cuMemMapArrayAsync`).

/// A part of an array: `subresource` says of which level and layer, or that it is the tail of small
/// levels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Region {
    /// The array's or mipmapped array's handle.
    pub(super) resource: u64,
    /// [`Region::LEVEL`] or [`Region::TAIL`].
    pub(super) subresource: u32,
    /// Mipmap level; 0 for the tail.
    pub(super) level: u32,
    pub(super) layer: u32,
    /// First texel (or byte, in the tail).
    pub(super) low: [u64; 3],
    /// One past the last, in each dimension.
    pub(super) high: [u64; 3],
}

impl Region {
    /// `CU_ARRAY_SPARSE_SUBRESOURCE_TYPE_SPARSE_LEVEL`
    pub(super) const LEVEL: u32 = 0;
    /// `CU_ARRAY_SPARSE_SUBRESOURCE_TYPE_MIPTAIL`
    pub(super) const TAIL: u32 = 1;

    /// Whether it has no extent: arrays that are mapped as a whole ignore it.
    fn is_whole(&self) -> bool {
        (0..3).any(|d| self.low[d] >= self.high[d])
    }

    fn same_place(&self, other: &Self) -> bool {
        self.resource == other.resource
            && self.subresource == other.subresource
            && self.level == other.level
            && self.layer == other.layer
    }

    /// Whether mapping or unmapping `self` ends some of what `other` holds.
    pub(super) fn touches(&self, other: &Self) -> bool {
        if self.resource != other.resource {
            return false;
        }
        self.is_whole()
            || self.same_place(other)
                && (other.is_whole()
                    || (0..3).all(|d| self.low[d] < other.high[d] && other.low[d] < self.high[d]))
    }

    /// What is left of `self` without `other`, which touches it: up to two slabs a dimension.
    pub(super) fn without(mut self, other: &Self) -> impl Iterator<Item = Self> {
        let mut parts = [None; 6];
        if !other.is_whole() && !self.is_whole() {
            for d in 0..3 {
                if self.low[d] < other.low[d] {
                    let mut below = self;
                    below.high[d] = other.low[d];
                    self.low[d] = other.low[d];
                    parts[2 * d] = Some(below);
                }
                if self.high[d] > other.high[d] {
                    let mut above = self;
                    above.low[d] = other.high[d];
                    self.high[d] = other.high[d];
                    parts[2 * d + 1] = Some(above);
                }
            }
        }
        parts.into_iter().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    fn cuboid(low: [u64; 3], extent: [u64; 3]) -> Region {
        let high = std::array::from_fn(|d| low[d] + extent[d]);
        Region { resource: 1, subresource: Region::LEVEL, level: 0, layer: 0, low, high }
    }

    fn voxels(of: &Region) -> HashSet<[u64; 3]> {
        let range = |d: usize| of.low[d]..of.high[d];
        let planes = range(0).flat_map(|x| range(1).map(move |y| (x, y)));
        planes.flat_map(|(x, y)| range(2).map(move |z| [x, y, z])).collect()
    }

    fn any_cuboid() -> impl Strategy<Value = Region> {
        let low = [0u64..6, 0u64..6, 0u64..6];
        let extent = [1u64..5, 1u64..5, 1u64..5];
        (low, extent).prop_map(|(low, extent)| cuboid(low, extent))
    }

    proptest! {
        #[test]
        fn what_is_left_is_the_difference_and_overlaps_nowhere(a in any_cuboid(), b in any_cuboid()) {
            let common: HashSet<_> = voxels(&a).intersection(&voxels(&b)).copied().collect();
            prop_assert_eq!(b.touches(&a), !common.is_empty());
            if b.touches(&a) {
                let parts: Vec<Region> = a.without(&b).collect();
                let mut left = HashSet::new();
                for part in &parts {
                    for voxel in voxels(part) {
                        prop_assert!(left.insert(voxel), "{part:?} overlaps another");
                    }
                }
                let expected: HashSet<_> = voxels(&a).difference(&common).copied().collect();
                prop_assert_eq!(left, expected);
            }
        }
    }

    #[test]
    fn levels_layers_and_arrays_are_apart() {
        let here = cuboid([0; 3], [4; 3]);
        for other in [
            Region { resource: 2, ..here },
            Region { subresource: Region::TAIL, ..here },
            Region { level: 1, ..here },
            Region { layer: 1, ..here },
        ] {
            assert!(!other.touches(&here), "{other:?}");
        }
    }

    #[test]
    fn without_extents_it_is_the_whole_array() {
        let whole = cuboid([0; 3], [0; 3]);
        let level = Region { level: 3, ..cuboid([1; 3], [4; 3]) };
        assert!(whole.touches(&level));
        assert_eq!(level.without(&whole).count(), 0);
        assert!(!cuboid([0; 3], [1; 3]).touches(&Region { resource: 2, ..whole }));
    }
}
