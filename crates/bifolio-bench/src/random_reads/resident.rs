//! The child process whose resident size is measured: many reads in flight over a file larger than
//! the cache.
//!
//! That process has nothing else: a bounded cache, a block for each request, the program.

use std::path::PathBuf;
use std::time::Duration;

use bifolio::Cache;
use serde::{Deserialize, Serialize};

use super::batched::read_many;
use super::one_by_one::Load;
use super::parameters::DEPTH;
use crate::error::Result;
use crate::harness::access::{Access, Draws, Pattern};
use crate::harness::cached::Cached;
use crate::harness::resident;
use crate::harness::sizes::Sizes;

/// Enough to keep the depth; their blocks are small compared with the smallest allowance.
const REQUESTS_PER_CALL: usize = 128;

/// Number of times the cache is filled.
const BOUNDS_READ: u64 = 4;

/// The task of the child.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Task {
    pub(crate) file: PathBuf,
    pub(crate) size_bytes: u64,
    pub(crate) memory_bytes: u64,
}

/// The result of the child.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Answer {
    pub(crate) peak_bytes: u64,
    pub(crate) verified_bytes: u64,
}

/// Reads pages chosen at random, several times as many as the cache holds.
pub(crate) fn read_at_random(task: &Task) -> Result<Answer> {
    let sizes = Sizes { size_bytes: task.size_bytes, memory_bytes: task.memory_bytes };
    let builder = Cache::builder().memory(task.memory_bytes).io_depth(usize::from(DEPTH));
    let cached = Cached::open(builder, &task.file, false)?;
    let load = Load {
        series: "read_many",
        access: &Access::new(Pattern::Uniform, task.size_bytes, 1),
        draws: &Draws::default(),
        threads: 1,
        duration: Duration::MAX,
        draw_end: BOUNDS_READ * sizes.memory_pages(),
        tracepoint: None,
    };
    let measured = read_many(&load, &cached.file, REQUESTS_PER_CALL)?;
    let peak_bytes = resident::peak_bytes()?;
    cached.close()?;
    Ok(Answer { peak_bytes, verified_bytes: measured.verified_bytes })
}
