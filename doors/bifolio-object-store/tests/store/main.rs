//! Reads through the cache: their bytes, requests, versions, faults, and the disk tier.
#![allow(missing_docs)]

mod cancellation;
mod changes;
mod conditions;
mod disk;
mod faults;
mod hanging_disk;
mod hangs;
mod histories;
mod hits;
mod kept;
mod killed;
mod model;
mod ranges;
mod reads;
mod suite;
mod support;
mod upkeep;
mod versions;

use bifolio_object_store as door;
