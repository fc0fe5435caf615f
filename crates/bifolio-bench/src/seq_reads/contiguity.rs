//! The share of neighbouring pages of a file that are in neighbouring frames: while frames are
//! free, and after the cache has been full and churning.

use std::time::{Duration, Instant};

use bifolio::{Cache, File};

use super::layout::{Layout, Plan};
use super::parameters::Parameters;
use crate::benchmark::Context;
use crate::error::{Error, Result};
use crate::harness::access::{Access, PAGE_BYTES, Pattern};
use crate::harness::pattern;
use crate::harness::threads::run_together;
use bifolio_report::{Case, Counts, Report, Row};

/// The series, and the states it is measured in.
pub(super) const SERIES: &str = "contiguity";
pub(super) const FREE: &str = "frames free";
pub(super) const CHURNED: &str = "after churn";

/// Ratio of the file that churns, and the bound.
const CHURN_FACTOR: u64 = 2;
const THREADS: usize = 2;
/// Interval of accesses that are writes.
const WRITE_INTERVAL: u64 = 2;

/// Fills a file in each state and adds a row for it.
pub(super) fn measure(
    context: &Context<'_>,
    parameters: &Parameters,
    report: &mut Report,
) -> Result<()> {
    let memory_bytes = parameters.churn_memory_bytes;
    let cache =
        || Cache::builder().memory(memory_bytes).swap_directory(context.workspace.path()).build();
    let file = cache()?.memory_file("filled")?;
    add_row(report, FREE, filled(&file, memory_bytes)?);
    drop(file);

    let cache = cache()?;
    // Stays open, so that the cache stays full.
    let churned = cache.memory_file("churned")?;
    let duration = Duration::from_secs_f64(parameters.churn_seconds);
    report.verified_bytes += churn(&churned, CHURN_FACTOR * memory_bytes, duration)?;
    let file = cache.memory_file("filled")?;
    add_row(report, CHURNED, filled(&file, memory_bytes)?);
    Ok(())
}

fn add_row(report: &mut Report, state: &str, share: f64) {
    let case = Case::new()
        .with("layout", Layout::Written.name())
        .with("folio_bytes", PAGE_BYTES as u64)
        .with("frames", state);
    let mut row = Row::new(case, "share of neighbours");
    row.add(SERIES, vec![share], Counts::new());
    report.rows.push(row);
}

/// Writes half of the bound in order. Returns the share of neighbours that are neighbours in
/// memory.
fn filled(file: &File, memory_bytes: u64) -> Result<f64> {
    let plan = Plan {
        layout: Layout::Written,
        size_bytes: memory_bytes / 2,
        folio_bytes: PAGE_BYTES as u64,
    };
    plan.make(file)?;
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
fn churn(file: &File, size_bytes: u64, duration: Duration) -> Result<u64> {
    let plan = Plan { layout: Layout::Written, size_bytes, folio_bytes: PAGE_BYTES as u64 };
    plan.make(file)?;
    let work = |thread: usize| -> Result<u64> {
        let access = Access::new(Pattern::Uniform, size_bytes, thread as u64);
        let mut page = [0; PAGE_BYTES];
        let mut verified_bytes = 0;
        let start = Instant::now();
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
                return Err(Error::WrongBytes { series: SERIES.to_owned(), pos_bytes });
            }
            verified_bytes += PAGE_BYTES as u64;
        }
        Ok(verified_bytes)
    };
    Ok(run_together(THREADS, Ok, work)?.into_iter().sum())
}
