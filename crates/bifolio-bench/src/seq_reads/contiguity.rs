//! The share of neighbouring pages of a file that are in neighbouring frames: while frames are
//! free, and after the cache has been full and churning.

use std::time::{Duration, Instant};

use bifolio::Cache;
use bifolio_report::{Case, Counts, Row};

use super::{CONTIGUITY, Layout, Parameters, Plan};
use crate::error::{Error, Result};
use crate::harness::access::{Access, PAGE_BYTES, Pattern};
use crate::harness::pattern;
use crate::harness::threads::run_together;
use crate::run::Run;

/// Ratio of the file that churns, and the bound; threads, and the interval of writes.
const CHURN_FACTOR: u64 = 2;
const CHURN_THREADS: usize = 2;
const WRITE_INTERVAL: u64 = 2;

/// Fills a file in each state and adds a row for it.
pub(super) fn measure(run: &mut Run<'_>, parameters: &Parameters) -> Result<()> {
    let memory_bytes = parameters.churn_memory_bytes;
    let directory = run.workspace.path();
    let cache = || Cache::builder().memory(memory_bytes).swap_directory(directory).build();
    let file = cache()?.memory_file("filled")?;
    let free = share_of_neighbours(&file, memory_bytes)?;
    drop(file);
    let cache = cache()?;
    // Stays open, so that the cache stays full.
    let churned = cache.memory_file("churned")?;
    let duration = Duration::from_secs_f64(parameters.churn_seconds);
    run.report.verified_bytes += churn(&churned, CHURN_FACTOR * memory_bytes, duration)?;
    let full = share_of_neighbours(&cache.memory_file("filled")?, memory_bytes)?;
    for (state, share) in [("frames free", free), ("after churn", full)] {
        let case = Case::new().with("layout", "written").with("folio_bytes", PAGE_BYTES);
        let mut row = Row::new(case.with("frames", state), "share of neighbours");
        row.add(CONTIGUITY, vec![share], Counts::new());
        run.report.rows.push(row);
    }
    Ok(())
}

fn written(size_bytes: u64) -> Plan {
    Plan { layout: Layout::Written, size_bytes, folio_bytes: PAGE_BYTES as u64 }
}

/// Writes half of the bound in order. Returns the share of neighbours that are neighbours in
/// memory.
fn share_of_neighbours(file: &bifolio::File, memory_bytes: u64) -> Result<f64> {
    written(memory_bytes / 2).make_in_cache(file)?;
    let (mut neighbours, mut adjacent, mut address_behind) = (0_u64, 0_u64, None);
    for position in (0..file.len()).step_by(PAGE_BYTES) {
        let page = position..position + PAGE_BYTES as u64;
        if file.residency(page.clone())?.resident == 0 {
            address_behind = None;
            continue;
        }
        let address = file.pin(page)?.as_ptr() as usize;
        if let Some(behind) = address_behind {
            neighbours += 1;
            adjacent += u64::from(address == behind);
        }
        address_behind = Some(address + PAGE_BYTES);
    }
    Ok(adjacent as f64 / neighbours.max(1) as f64)
}

/// Reads and writes pages of `file` at random for `duration`, and checks the bytes read. Returns
/// their number.
fn churn(file: &bifolio::File, size_bytes: u64, duration: Duration) -> Result<u64> {
    written(size_bytes).make_in_cache(file)?;
    let work = |thread: usize| -> Result<u64> {
        let access = Access::new(Pattern::Uniform, size_bytes, thread as u64);
        let mut page = [0; PAGE_BYTES];
        let (mut verified_bytes, start) = (0, Instant::now());
        for draw in 0.. {
            if start.elapsed() >= duration {
                break;
            }
            let pos_bytes = access.pos_bytes(draw);
            if draw.is_multiple_of(WRITE_INTERVAL) {
                pattern::fill(&mut page, pos_bytes);
                file.write_all_at(&page, pos_bytes)?;
                continue;
            }
            file.read_exact_at(&mut page, pos_bytes)?;
            if !pattern::matches(&page, pos_bytes) {
                return Err(Error::WrongBytes { series: CONTIGUITY.to_owned(), pos_bytes });
            }
            verified_bytes += PAGE_BYTES as u64;
        }
        Ok(verified_bytes)
    };
    Ok(run_together(CHURN_THREADS, Ok, work)?.into_iter().sum())
}
