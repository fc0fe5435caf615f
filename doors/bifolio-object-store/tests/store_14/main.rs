//! The tests of `store` for the line 0.14 of `object_store`.
#![cfg(feature = "object-store-14")]
#![allow(missing_docs)]

// Instead of the dependency of this name.
extern crate object_store_14 as object_store;

#[path = "../store/cancellation.rs"]
mod cancellation;
#[path = "../store/changes.rs"]
mod changes;
#[path = "../store/conditions.rs"]
mod conditions;
#[path = "../store/disk.rs"]
mod disk;
#[path = "../store/faults.rs"]
mod faults;
#[path = "../store/hanging_disk.rs"]
mod hanging_disk;
#[path = "../store/hangs.rs"]
mod hangs;
#[path = "../store/histories.rs"]
mod histories;
#[path = "../store/hits.rs"]
mod hits;
#[path = "../store/kept.rs"]
mod kept;
#[path = "../store/killed.rs"]
mod killed;
#[path = "../store/model.rs"]
mod model;
#[path = "../store/ranges.rs"]
mod ranges;
#[path = "../store/reads.rs"]
mod reads;
#[path = "../store/suite.rs"]
mod suite;
#[path = "../store/support.rs"]
mod support;
#[path = "../store/upkeep.rs"]
mod upkeep;
#[path = "../store/versions.rs"]
mod versions;

use bifolio_object_store::v14 as door;
