//! Where families and their series are written.

use nix::sys::resource::{Resource, getrlimit};
use nix::time::{ClockId, clock_gettime};
use std::fmt;

use prometheus_client::encoding::{
    DescriptorEncoder, EncodeCounterValue, EncodeGaugeValue, MetricEncoder, NoLabelSet,
};
use prometheus_client::metrics::exemplar::Exemplar;

use crate::metrics::families::Family;

pub(super) struct Writer<'e>(pub(super) DescriptorEncoder<'e>);

impl Writer<'_> {
    pub(super) fn family(
        &mut self,
        family: &Family,
        fill: impl FnOnce(&mut Series<'_, '_>) -> fmt::Result,
    ) -> fmt::Result {
        let (unit, kind) = (family.unit(), family.metric_type());
        let encoder = self.0.encode_descriptor(family.base, family.help, unit.as_ref(), kind)?;
        fill(&mut Series { encoder, names: family.labels })
    }

    pub(super) fn gauge(&mut self, family: &Family, value: impl EncodeGaugeValue) -> fmt::Result {
        self.family(family, |series| series.encoder.encode_gauge(&value))
    }

    pub(super) fn counter(
        &mut self,
        family: &Family,
        value: impl EncodeCounterValue,
    ) -> fmt::Result {
        self.family(family, |series| series.encoder.encode_counter(&value, NO_EXEMPLAR))
    }
}

const NO_EXEMPLAR: Option<&Exemplar<NoLabelSet, f64>> = None;

/// Where the series of one family are written; their labels' values come in the family's order.
pub(super) struct Series<'e, 'n> {
    encoder: MetricEncoder<'e>,
    names: &'n [&'static str],
}

impl Series<'_, '_> {
    fn labels<'v>(&self, values: &[&'v str]) -> Vec<(&'static str, &'v str)> {
        debug_assert_eq!(self.names.len(), values.len(), "a value for each label");
        self.names.iter().copied().zip(values.iter().copied()).collect()
    }

    pub(super) fn gauge(&mut self, values: &[&str], value: impl EncodeGaugeValue) -> fmt::Result {
        let labels = self.labels(values);
        self.encoder.encode_family(&labels)?.encode_gauge(&value)
    }

    pub(super) fn counter(
        &mut self,
        values: &[&str],
        value: impl EncodeCounterValue,
    ) -> fmt::Result {
        let labels = self.labels(values);
        self.encoder.encode_family(&labels)?.encode_counter(&value, NO_EXEMPLAR)
    }

    pub(super) fn info(&mut self, values: &[&str]) -> fmt::Result {
        let labels = self.labels(values);
        self.encoder.encode_info(&labels)
    }

    pub(super) fn histogram(
        &mut self,
        values: &[&str],
        buckets: &[(f64, u64)],
        sum: f64,
    ) -> fmt::Result {
        let count = buckets.iter().map(|(_, count)| count).sum();
        let labels = self.labels(values);
        let mut encoder = self.encoder.encode_family(&labels)?;
        encoder.encode_histogram::<NoLabelSet>(sum, count, buckets, None)
    }
}

/// What the kernel says of this process, by the names of Prometheus' own clients; `None` where it does not.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Process {
    pub cpu_seconds: Option<f64>,
    pub resident_bytes: Option<u64>,
    pub virtual_bytes: Option<u64>,
    pub threads: Option<u64>,
    pub open_fds: Option<u64>,
    pub max_fds: Option<u64>,
}

impl Process {
    /// As it is now.
    pub fn read() -> Self {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name))?;
            line.trim_start_matches(':').split_whitespace().next()?.parse::<u64>().ok()
        };
        let kib = |name: &str| field(name).map(|kib| kib.saturating_mul(1024));
        let cpu = clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID).ok();
        // One of them reads the directory.
        let entries = std::fs::read_dir("/proc/self/fd").ok();
        let open = entries.and_then(|entries| u64::try_from(entries.count()).ok());
        Process {
            cpu_seconds: cpu.map(|cpu| std::time::Duration::from(cpu).as_secs_f64()),
            resident_bytes: kib("VmRSS"),
            virtual_bytes: kib("VmSize"),
            threads: field("Threads"),
            open_fds: open.map(|open| open.saturating_sub(1)),
            max_fds: getrlimit(Resource::RLIMIT_NOFILE).ok().map(|(soft, _)| soft),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_tells_all_of_it() {
        let process = Process::read();
        assert!(process.cpu_seconds.unwrap() > 0.0);
        assert!(process.resident_bytes.unwrap() > 1 << 20);
        assert!(process.virtual_bytes.unwrap() >= process.resident_bytes.unwrap());
        assert!(process.threads.unwrap() >= 1);
        assert!((3..process.max_fds.unwrap()).contains(&process.open_fds.unwrap()));
    }
}
