//! redb databases over the cache: redb's workloads, against a model, crashes, kills, full disks.
#![allow(missing_docs)]

mod crashes;
mod full_disks;
mod kills;
mod locks;
mod model;
mod sharing;
mod workloads;
