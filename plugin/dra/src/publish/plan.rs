//! Which write comes next: the desired slices against those that are there. Pure, and without memory.
//!
//! **Order**: what is obsolete is deleted, what is there is updated, what is missing is made. A pool whose slices
//! change in more than one write gets a new generation: the scheduler takes nothing from a pool of which it has
//! seen a part only.

use tessera_cluster::k8s_openapi::api::resource::v1::{Device, ResourceSlice};

use super::controller::Step;
use super::pool::{self, Node};

/// What is there, by its place in the pool.
pub(super) struct Standing<'a> {
    /// As many as are desired.
    places: Vec<Option<&'a ResourceSlice>>,
    obsolete: Vec<&'a str>,
    /// The highest generation of what is at a place.
    generation: i64,
}

impl<'a> Standing<'a> {
    /// Of `observed` for `count` desired slices.
    pub(super) fn of(
        observed: impl IntoIterator<Item = &'a ResourceSlice>,
        node: &Node,
        count: usize,
    ) -> Self {
        let mut standing =
            Standing { places: vec![None; count], obsolete: Vec::new(), generation: 0 };
        for slice in observed {
            let place = pool::index(slice).filter(|_| pool::is_of(slice, node));
            let gone = match place.and_then(|index| standing.places.get_mut(index)) {
                None => Some(slice),
                Some(place) => match place {
                    Some(other) if rank(other) >= rank(slice) => Some(slice),
                    _ => place.replace(slice),
                },
            };
            standing.obsolete.extend(gone.and_then(|slice| slice.metadata.name.as_deref()));
        }
        let generations = standing.places.iter().flatten().map(|slice| slice.spec.pool.generation);
        standing.generation = generations.max().unwrap_or(0);
        standing
    }

    /// The highest generation; 0 where there is no slice of the pool.
    pub(super) fn generation(&self) -> i64 {
        self.generation
    }

    /// The generation under which `devices` are published: that of the slices which are there, if it takes one
    /// write at most, or the next.
    pub(super) fn next_generation(
        &self,
        node: &Node,
        devices: &[Device],
        is_in_sync: &dyn Fn(&ResourceSlice, &ResourceSlice) -> bool,
    ) -> i64 {
        let lacking = self.lacking(node, devices, self.generation, is_in_sync).count();
        match self.generation >= 1 && lacking <= 1 {
            true => self.generation,
            false => self.generation + 1,
        }
    }

    /// The next write; none where all is as it should be.
    pub(super) fn write(
        &self,
        node: &Node,
        devices: &[Device],
        generation: i64,
        is_in_sync: &dyn Fn(&ResourceSlice, &ResourceSlice) -> bool,
    ) -> Option<Step> {
        if let Some(name) = self.obsolete.first() {
            return Some(Step::Delete((*name).to_owned()));
        }
        let update = |(there, wanted): (Option<&ResourceSlice>, ResourceSlice)| {
            let mut slice = wanted;
            let there = there?;
            slice.metadata.generate_name = None;
            slice.metadata.name.clone_from(&there.metadata.name);
            slice.metadata.resource_version.clone_from(&there.metadata.resource_version);
            Some(Step::Update(Box::new(slice)))
        };
        let mut updates = self.lacking(node, devices, generation, is_in_sync).filter_map(update);
        updates.next().or_else(|| {
            let mut lacking = self.lacking(node, devices, generation, is_in_sync);
            lacking.next().map(|(_, wanted)| Step::Create(Box::new(wanted)))
        })
    }

    fn lacking<'s>(
        &'s self,
        node: &'s Node,
        devices: &'s [Device],
        generation: i64,
        is_in_sync: &'s dyn Fn(&ResourceSlice, &ResourceSlice) -> bool,
    ) -> impl Iterator<Item = (Option<&'a ResourceSlice>, ResourceSlice)> + 's {
        let parts = pool::cut(devices);
        let count = parts.len();
        let wanted = parts.into_iter().enumerate();
        wanted.zip(&self.places).filter_map(move |((index, part), there)| {
            let wanted = pool::slice(node, part, index, count, generation);
            let right = there.is_some_and(|there| is_in_sync(there, &wanted));
            (!right).then_some((*there, wanted))
        })
    }
}

/// Of two slices at one place the one with the higher rank stays.
fn rank(slice: &ResourceSlice) -> (i64, std::cmp::Reverse<&str>) {
    let name = slice.metadata.name.as_deref().unwrap_or_default();
    (slice.spec.pool.generation, std::cmp::Reverse(name))
}
