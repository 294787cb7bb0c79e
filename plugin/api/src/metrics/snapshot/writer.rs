//! Where families and their series are written.

use std::fmt;

use prometheus_client::encoding::{
    DescriptorEncoder, EncodeCounterValue, EncodeGaugeValue, MetricEncoder, NoLabelSet,
};
use prometheus_client::metrics::exemplar::Exemplar;

use crate::metrics::families::Family;

/// Where families are written.
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
