//! What each GPU is cut into, and which front end sells it: the configuration's `[share]`, `[[layout]]` and `[dra]`, applied
//! to a GPU. Pure.

use crate::capacity::Capacity;
use strum::IntoStaticStr;
use tessera_config::{Amount, Config, LayoutShare};
use tessera_model::gpu::Gpu;
use tessera_model::sharing::{Compute, Placement, Split};

/// Limits of memory that are not written in bytes are whole multiples of this, so that they read
/// well.
const GRAIN_BYTES: u64 = 1 << 20;
/// Thousandths in a GPU.
const WHOLE_MILLIS: u64 = 1000;

/// What sells a GPU: exactly one does, by configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr)]
#[strum(const_into_str)]
pub enum FrontEnd {
    #[strum(to_string = "device plugin")]
    DevicePlugin,
    #[strum(to_string = "DRA")]
    Dra,
}

/// Which one the configuration wants to sell this GPU. What it sold before may not have ended yet.
pub fn front_end_of(gpu: &Gpu, config: &Config) -> FrontEnd {
    let dra = &config.dra;
    match dra.enabled && dra.gpus.iter().any(|entry| gpu.is_named(entry)) {
        true => FrontEnd::Dra,
        false => FrontEnd::DevicePlugin,
    }
}

/// Equal replicas of one GPU, sold under one name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Share {
    pub resource: String,
    pub count: u32,
    /// Of each.
    pub memory_bytes: u64,
    pub cores_millis: u32,
    pub compute: Compute,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    pub placement: Placement,
    pub split: Split,
}

/// Which layout counts for a GPU, as its place in the configuration; `None`: `[share]` does.
pub fn layout_of(gpu: &Gpu, config: &Config) -> Option<usize> {
    config.layouts.iter().position(|layout| layout.gpus.iter().any(|entry| gpu.is_named(entry)))
}

/// What a GPU is cut into for the device plugin, in the configuration's order: nothing where it is sold by
/// another front end.
pub fn cut(gpu: &Gpu, config: &Config) -> Vec<Share> {
    if front_end_of(gpu, config) != FrontEnd::DevicePlugin {
        return Vec::new();
    }
    let Some(layout) = layout_of(gpu, config).map(|i| &config.layouts[i]) else {
        return vec![equal(gpu, config)];
    };
    let sellable = Capacity::of(gpu, config).sellable();
    let bytes = |share: &LayoutShare| (share.count, exact(share.memory, sellable));
    let time = |share: &LayoutShare| (share.count, share.cores_millis.map(u64::from));
    let memory = divide(sellable, layout.shares.iter().map(bytes), GRAIN_BYTES);
    let cores = divide(WHOLE_MILLIS, layout.shares.iter().map(time), 1);
    let limits = memory.into_iter().zip(cores);
    layout
        .shares
        .iter()
        .zip(limits)
        .map(|(share, (memory_bytes, cores))| Share {
            resource: share.resource.clone(),
            count: share.count,
            memory_bytes,
            cores_millis: millis(cores),
            compute: share.compute.unwrap_or(config.share.compute),
        })
        .collect()
}

/// The equal replicas that `[share]` makes of a GPU, whichever front end sells it. By DRA, one of them is what a
/// claim gets that says no size, and what a cluster without consumable capacity is offered.
pub fn equal(gpu: &Gpu, config: &Config) -> Share {
    let share = &config.share;
    let memory = [(share.replicas, share.memory_bytes)].into_iter();
    let cores = [(share.replicas, share.cores_millis.map(u64::from))].into_iter();
    let sellable = Capacity::of(gpu, config).sellable();
    Share {
        resource: config.resource.name.clone(),
        count: share.replicas,
        memory_bytes: divide(sellable, memory, GRAIN_BYTES)[0],
        cores_millis: millis(divide(WHOLE_MILLIS, cores, 1)[0]),
        compute: share.compute,
    }
}

/// How requests for `resource` are met. The configuration has seen to it that layouts agree.
pub fn terms(resource: &str, config: &Config) -> Terms {
    let said = config
        .layouts
        .iter()
        .flat_map(|layout| &layout.shares)
        .find(|share| share.resource == resource);
    Terms {
        placement: said.and_then(|share| share.placement).unwrap_or(config.share.placement),
        split: said.and_then(|share| share.split).unwrap_or(config.share.split),
    }
}

/// Bytes of a GPU that has so many to sell; a part is rounded down.
fn exact(amount: Amount, sellable: u64) -> Option<u64> {
    match amount {
        Amount::Exact(bytes) => Some(bytes),
        part => part.of(sellable).map(|bytes| bytes - bytes % GRAIN_BYTES),
    }
}

/// What one of each gets of `whole`: what it says, and those that say nothing an even part of the rest, rounded down to
/// a multiple of `grain`.
fn divide(
    whole: u64,
    lines: impl Iterator<Item = (u32, Option<u64>)> + Clone,
    grain: u64,
) -> Vec<u64> {
    let taken = lines.clone().fold(0u64, |sum, (count, said)| {
        sum.saturating_add(said.unwrap_or(0).saturating_mul(count.into()))
    });
    let autos: u64 =
        lines.clone().filter(|(_, said)| said.is_none()).map(|(count, _)| u64::from(count)).sum();
    let even = whole.saturating_sub(taken).checked_div(autos).unwrap_or(0);
    lines.map(|(_, said)| said.unwrap_or(even - even % grain)).collect()
}

/// At most a whole GPU, as the configuration says.
fn millis(cores: u64) -> u32 {
    u32::try_from(cores).unwrap_or(1000).min(1000)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GIB: u64 = 1 << 30;

    const LAYOUTS: &str = r#"
        [share]
        replicas = 4
        compute = "strict"
        placement = "distributed"
        [[layout]]
        gpus = ["GPU-b"]
        shares = [{ resource = "x.dev/whole" }]
        [[layout]]
        gpus = ["NVIDIA A100*", "7"]
        shares = [
          { resource = "x.dev/large", count = 1, memory = "50%", cores = "50%", split = "spread" },
          { resource = "x.dev/small", count = 2, memory = "25%", cores = "250m", compute = "burst" },
        ]
    "#;

    fn gpu(uuid: &str, index: u32, name: &str) -> Gpu {
        Gpu { name: name.into(), ..Gpu::example(uuid, index) }
    }

    fn rows(shares: &[Share]) -> Vec<(&str, u32, u64, u32)> {
        let row = |share: &Share| share.memory_bytes >> 20;
        shares.iter().map(|s| (s.resource.as_str(), s.count, row(s), s.cores_millis)).collect()
    }

    #[test]
    fn without_a_layout_all_replicas_are_equal() {
        let cut = cut(&Gpu::example("GPU-a", 0), &Config::default());
        let each = (80 * GIB - (512 << 20)) / 4;
        assert_eq!(cut.len(), 1);
        assert_eq!((cut[0].resource.as_str(), cut[0].count), ("tessera.dev/gpu", 4));
        assert_eq!((cut[0].memory_bytes, cut[0].cores_millis), (each, 250));
    }

    #[test]
    fn the_first_layout_that_names_a_gpu_counts() {
        let config = Config::parse(LAYOUTS).unwrap();
        let left = 80 * 1024 - 512;
        let a100 = cut(&gpu("GPU-a", 0, "NVIDIA A100-SXM4-80GB"), &config);
        assert_eq!(
            rows(&a100),
            [("x.dev/large", 1, left / 2, 500), ("x.dev/small", 2, left / 4, 250)]
        );
        assert_eq!((a100[0].compute, a100[1].compute), (Compute::Strict, Compute::Burst));
        // Named by both: the first one counts, and it leaves out what it does not limit.
        let both = cut(&gpu("GPU-b", 7, "NVIDIA A100-SXM4-80GB"), &config);
        assert_eq!(rows(&both), [("x.dev/whole", 1, left, 1000)]);
        let by_index = cut(&gpu("GPU-c", 7, "NVIDIA L4"), &config);
        assert_eq!(by_index.len(), 2);
        let none = cut(&gpu("GPU-d", 1, "NVIDIA L4"), &config);
        assert_eq!(rows(&none), [("tessera.dev/gpu", 4, left / 4, 250)]);
    }

    #[test]
    fn automatic_shares_divide_what_the_others_leave() {
        let config = Config::parse(
            "[gpus]\nreserve = 0\n[[layout]]\ngpus = [\"*\"]\nshares = [\n\
             { resource = \"x.dev/a\", memory = \"40Gi\", cores = \"400m\" },\n\
             { resource = \"x.dev/b\", count = 2, memory = \"12.5%\" },\n\
             { resource = \"x.dev/c\", count = 2 },\n]\n",
        )
        .unwrap();
        let cut = cut(&Gpu::example("GPU-a", 0), &config);
        assert_eq!(
            rows(&cut),
            [
                ("x.dev/a", 1, 40 << 10, 400),
                ("x.dev/b", 2, 10 << 10, 150),
                ("x.dev/c", 2, 10 << 10, 150)
            ]
        );
    }

    #[test]
    fn terms_are_a_layouts_own_or_those_of_share() {
        let config = Config::parse(LAYOUTS).unwrap();
        let large = Terms { placement: Placement::Distributed, split: Split::Spread };
        assert_eq!(terms("x.dev/large", &config), large);
        assert_eq!(terms("x.dev/small", &config), Terms { split: Split::Reject, ..large });
        assert_eq!(terms("tessera.dev/gpu", &config), Terms { split: Split::Reject, ..large });
    }

    fn config(text: &str) -> Config {
        Config::parse(text).unwrap()
    }

    #[test]
    fn a_gpu_has_one_seller() {
        let gpus = [Gpu::example("GPU-a", 0), Gpu::example("GPU-b", 1)];
        let sellers = |text: &str| gpus.clone().map(|gpu| front_end_of(&gpu, &config(text)));
        let [plugin, dra] = [FrontEnd::DevicePlugin, FrontEnd::Dra];
        assert_eq!(sellers(""), [plugin, plugin]);
        assert_eq!(sellers("[dra]\ngpus = [\"0\"]"), [plugin, plugin], "it is off");
        assert_eq!(sellers("[dra]\nenabled = true"), [dra, dra]);
        assert_eq!(sellers("[dra]\nenabled = true\ngpus = [\"GPU-b\"]"), [plugin, dra]);
        assert_eq!(sellers("[dra]\nenabled = true\ngpus = []"), [plugin, plugin]);
    }

    #[test]
    fn the_device_plugin_gets_nothing_of_what_dra_sells() {
        let config = config("[dra]\nenabled = true\ngpus = [\"0\"]\n[share]\nreplicas = 5");
        let (claimed, plain) = (Gpu::example("GPU-a", 0), Gpu::example("GPU-b", 1));
        assert_eq!(cut(&claimed, &config), []);
        assert_eq!(cut(&plain, &config), [equal(&plain, &config)]);
        assert_eq!(equal(&claimed, &config).count, 5);
    }

    /// Lines whose percentages are at most a hundred together, as a layout's are.
    fn lines() -> impl Strategy<Value = Vec<(u32, Amount)>> {
        let amount = prop_oneof![Just(Amount::Auto), (1u32..=100_000).prop_map(Amount::Percent)];
        prop::collection::vec((1u32..8, amount), 1..6).prop_map(|mut lines| {
            let mut left = 100_000;
            for (count, amount) in &mut lines {
                let Amount::Percent(part) = *amount else { continue };
                let part = part.min(left / *count);
                left -= part * *count;
                *amount = if part == 0 { Amount::Auto } else { Amount::Percent(part) };
            }
            lines
        })
    }

    proptest! {
        #[test]
        fn percentages_of_at_most_a_hundred_never_exceed_the_whole(
            whole in 0..200 * GIB,
            lines in lines(),
        ) {
            let said = lines.iter().map(|(count, amount)| (*count, exact(*amount, whole)));
            let each = divide(whole, said, GRAIN_BYTES);
            let sum: u64 = each.iter().zip(&lines).map(|(u, (n, _))| u * u64::from(*n)).sum();
            prop_assert!(sum <= whole);
        }
    }
}
