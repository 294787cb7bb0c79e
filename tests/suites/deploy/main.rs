//! What users are given, as it was built: `tessera run`, quotas that change under running processes, the
//! demo, the chart, the image and the suite for real GPUs.

mod chart;
mod demo;
mod gpu_suite;
mod image;
mod run;
mod sandbox;
mod steer;
