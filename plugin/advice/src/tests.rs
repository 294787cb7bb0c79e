//! What is advised, and the laws that advice keeps.

mod apart;
mod laws;
mod recommending;
mod wasting;

use tessera_config::Advice;
use tessera_view::advice::{Recommendation, Recommendations, Waste};

use crate::fixtures::Made;
use crate::{Observed, Question};

fn observed(made: &[Made]) -> Vec<Observed<'_>> {
    made.iter().map(|one| Observed { node: &one.node, history: &one.history }).collect()
}

fn recommend(made: &[Made]) -> Recommendations {
    crate::recommend(&observed(made), &Advice::default(), &Question::default())
}

/// Of the only workload there is.
fn only(made: &[Made]) -> Recommendation {
    let mut all = recommend(made).workloads;
    assert_eq!(all.len(), 1, "{all:?}");
    all.remove(0)
}

fn waste(made: &[Made], settings: &Advice) -> Waste {
    crate::waste(&observed(made), settings, &Question::default())
}

#[track_caller]
fn says(list: &[String], part: &str) {
    assert!(list.iter().any(|text| text.contains(part)), "\"{part}\" in {list:#?}");
}

/// The commands and lines of the change.
fn lines(advice: &Recommendation) -> Vec<String> {
    advice.changes.iter().map(|change| change.text.clone()).collect()
}
