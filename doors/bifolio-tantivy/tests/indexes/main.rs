//! tantivy indexes over the cache: the directory's calls, a model, kills, full disks.
#![allow(missing_docs)]

mod directory;
mod full_disks;
mod kills;
mod model;
mod searches;
