//! `hit-ratio`: misses of the cache beside models of eviction policies with as many pages.
//!
//! Generated traces (`generators`), or a recorded one (`trace`), are replayed through a cache over
//! a backing in memory (`replay`) with room for a part of the pages that the trace uses. How many
//! pages that cache really had on average is the capacity of the models (`models`). The values are
//! misses in percent of the references; the first use of a page counts as one. Nothing is timed,
//! so the sizes of a trace run at once, and the figures do not depend on the machine.
//!
//! Two rows have the misses of the program of `tenants` that reads at random: beside the scan of
//! the other one, in a class with a floor of a half and of nine tenths of the memory; and of the
//! same reads alone in that much memory.
//!
//! One row has the geometric means over the traces at a cache of 10 %, with the best model of that
//! row. Belady's policy is not among the candidates, because it knows the future.

mod generators;
mod models;
mod queues;
mod replay;
mod trace;

use std::thread;

use bifolio_report::{Case, Counts, Figure, Ratio, Report, Row, Skipped};
use serde::Serialize;

use self::generators::GENERATORS;
use self::models::{BELADY, LRU, POLICIES, misses};
use self::replay::{BIFOLIO, Tenant, replay};
use self::trace::Trace;
use crate::benchmark::{Benchmark, Context, Needs};
use crate::config::{Config, ParameterSet, Target};
use crate::error::Result;
use crate::progress::Progress;

const NAME: &str = "hit-ratio";
const UNIT: &str = "% misses";
const OF_LRU: Ratio = Ratio::new(BIFOLIO, LRU);
/// The series of the mean: the model with the fewest misses in that row.
const BEST: &str = "best_model";
/// The trace of two programs, of which one scans.
const TENANTS: &str = "tenants";
/// The series of a tenant in a cache of its own.
const ALONE: &str = "alone";
/// The size of the cache that is summarised, in percent of the pages of the trace.
const SUMMARY_PERCENT: u32 = 10;

/// A cache of others to replay the traces through.
#[derive(Clone, Copy, Debug)]
pub struct Rival {
    /// The name of its series.
    pub name: &'static str,
    /// Returns the misses of references to pages, with room for so many of them.
    pub misses: fn(capacity_pages: usize, references: &[u32]) -> u64,
}

/// The benchmark `hit-ratio`: misses of generated or recorded traces, beside models of eviction
/// policies and beside rivals.
#[derive(Clone, Copy, Debug)]
pub struct HitRatio {
    /// The caches beside the models; none in `bifolio bench`.
    pub rivals: &'static [Rival],
}

/// The parameters of one run, as the envelope shows them.
#[derive(Clone, Debug, Serialize)]
struct Parameters {
    pages: u32,
    references: usize,
    percents: Vec<u32>,
    /// The recorded trace that is replayed instead of the generated ones.
    trace: Option<String>,
}

impl Parameters {
    fn from_config(config: &Config) -> Self {
        let (pages, references, percents): (_, _, &[u32]) = match config.set {
            ParameterSet::Smoke => (6000, 40_000, &[SUMMARY_PERCENT]),
            ParameterSet::Quick if config.summary_only => (60_000, 600_000, &[SUMMARY_PERCENT]),
            ParameterSet::Quick => (60_000, 600_000, &[5, SUMMARY_PERCENT, 25, 50]),
            ParameterSet::Full => (200_000, 4_000_000, &[1, 2, 5, SUMMARY_PERCENT, 25, 50, 75]),
        };
        let trace = config.trace.as_ref().map(|path| path.display().to_string());
        Self { pages, references, percents: percents.to_vec(), trace }
    }
}

impl Benchmark for HitRatio {
    fn name(&self) -> &'static str {
        NAME
    }

    fn description(&self) -> &'static str {
        "misses of generated or recorded traces, against models of eviction policies"
    }

    fn needs(&self, config: &Config) -> Result<Needs> {
        let parameters = Parameters::from_config(config);
        let of_models = (parameters.references * 24 + parameters.pages as usize * 64) as u64;
        let of_all_models = of_models * parameters.percents.len() as u64;
        let percent = parameters.percents.iter().copied().map(u64::from).sum::<u64>();
        let of_caches = u64::from(parameters.pages) * 4096 * percent / 100;
        Ok(Needs { disk_bytes: 0, memory_bytes: of_all_models + of_caches })
    }

    fn run(&self, context: &Context<'_>, progress: &mut dyn Progress) -> Result<Report> {
        let parameters = Parameters::from_config(context.config);
        let mut report = Report::new(NAME, &context.host, serde_json::to_value(&parameters)?);
        if context.config.target == Target::Kernel {
            let reason = "the kernel's page cache is not replayed".to_owned();
            report.skipped.push(Skipped { series: "*".into(), reason });
            return Ok(report);
        }
        report.ratios = vec![OF_LRU, Ratio::new(BIFOLIO, BEST), Ratio::new(BIFOLIO, ALONE)];
        let traces = traces(context.config, &parameters)?;
        progress.start("replay", traces.len() as u64);
        for trace in &traces {
            for row in run_trace(trace, &parameters.percents, self.rivals)? {
                report.verified_bytes += trace.references.len() as u64 * 8;
                report.rows.push(row);
            }
            if trace.name == TENANTS {
                report.rows.extend(tenant_rows(trace)?);
            }
            progress.advance(1);
        }
        report.figures = report.rows.iter().filter_map(figure).collect();
        report.rows.extend(means(&report.rows));
        report.notes.push("belady knows the future: no policy can have fewer misses".into());
        Ok(report)
    }
}

fn traces(config: &Config, parameters: &Parameters) -> Result<Vec<Trace>> {
    if let Some(path) = &config.trace {
        return Ok(vec![trace::read(path)?]);
    }
    let Parameters { pages, references, .. } = *parameters;
    let generators = GENERATORS.iter();
    let generated = generators.map(|generator| {
        let references = (generator.generate)(pages, references);
        Trace { name: generator.name.into(), references, pages }
    });
    Ok(generated.collect())
}

/// Replays a trace with each size, all at once.
fn run_trace(trace: &Trace, percents: &[u32], rivals: &[Rival]) -> Result<Vec<Row>> {
    thread::scope(|scope| {
        let replay = |percent| scope.spawn(move || run_size(trace, percent, rivals));
        let threads: Vec<_> = percents.iter().copied().map(replay).collect();
        threads.into_iter().map(|thread| thread.join().expect("a replay panicked")).collect()
    })
}

fn run_size(trace: &Trace, percent: u32, rivals: &[Rival]) -> Result<Row> {
    let Trace { name, references, pages } = trace;
    let wanted_pages = (u64::from(*pages) * u64::from(percent) / 100).max(64);
    let replayed = replay(references, *pages, wanted_pages, None)?;
    let capacity = replayed.resident_pages as usize;
    let case = Case::new().with("trace", name.clone()).with("cache_percent", percent);
    let mut row = Row::new(case, UNIT);
    let mut add = |name, misses: u64, counts| {
        row.add(name, vec![misses as f64 * 100.0 / references.len() as f64], counts);
    };
    let pages_of_cache = ("pages".to_owned(), replayed.resident_pages as f64);
    add(BIFOLIO, replayed.misses, Counts::from([pages_of_cache]));
    for name in POLICIES {
        add(name, misses(name, capacity, *pages as usize, references), Counts::new());
    }
    for rival in rivals {
        add(rival.name, (rival.misses)(capacity, references), Counts::new());
    }
    Ok(row)
}

/// Returns the misses of the tenant that reads at random, in percent of its references: without a
/// class, in one with a floor, and alone in as much memory as that floor.
fn tenant_rows(trace: &Trace) -> Result<Vec<Row>> {
    let tenant_pages = trace.pages / 2;
    let of_tenant: Vec<u32> =
        trace.references.iter().copied().filter(|page| *page < tenant_pages).collect();
    let wanted_pages = (u64::from(trace.pages) * u64::from(SUMMARY_PERCENT) / 100).max(64);
    let row = |percent: u64| {
        let floor_pages = wanted_pages * percent / 100;
        let tenant = |floor_pages| Some(Tenant { pages: tenant_pages, floor_pages });
        let case = Case::new()
            .with("trace", "tenant_beside_a_scan")
            .with("memory_percent", SUMMARY_PERCENT)
            .with("floor_percent", percent as u32);
        let mut row = Row::new(case, UNIT);
        let mut add = |name, misses: u64| {
            row.add(name, vec![misses as f64 * 100.0 / of_tenant.len() as f64], Counts::new());
        };
        let beside = |tenant| replay(&trace.references, trace.pages, wanted_pages, tenant);
        add(BIFOLIO, beside(tenant(floor_pages))?.misses);
        add("without_floor", beside(tenant(0))?.misses);
        add(ALONE, replay(&of_tenant, tenant_pages, floor_pages, None)?.misses);
        Ok(row)
    };
    [50, 90].into_iter().map(row).collect()
}

/// Returns the row of geometric means at the size that is summarised, with the best model in it.
fn means(rows: &[Row]) -> Option<Row> {
    let is_summarised =
        |row: &&Row| row.case.number("cache_percent") == Some(f64::from(SUMMARY_PERCENT));
    let summarised: Vec<&Row> = rows.iter().filter(is_summarised).collect();
    let case = Case::new().with("trace", "geometric_mean").with("cache_percent", SUMMARY_PERCENT);
    let (mut mean, mut best) = (Row::new(case, UNIT), f64::INFINITY);
    for name in summarised.first()?.series.keys() {
        let logarithms: f64 = summarised.iter().map(|row| row.series[name].ln()).sum();
        let value = (logarithms / summarised.len() as f64).exp();
        mean.series.insert(name.clone(), value);
        mean.spread.insert(name.clone(), [value; 2]);
        if POLICIES.contains(&name.as_ref()) && name.as_ref() != BELADY {
            best = best.min(value);
        }
    }
    mean.add(BEST, vec![best], Counts::new());
    Some(mean)
}

/// Returns the figure of a row of a generated trace.
fn figure(row: &Row) -> Option<Figure> {
    let trace = row.case.text("trace");
    let target = GENERATORS.iter().find(|generator| generator.name == trace)?.at_most;
    let is_summarised = row.case.number("cache_percent") == Some(f64::from(SUMMARY_PERCENT));
    let name = format!("misses, bifolio / lru, {trace}, {SUMMARY_PERCENT} %");
    let value = row.ratio(&OF_LRU).filter(|_| is_summarised)?;
    Some(Figure { name, value, target, at_most: true })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mean_has_the_best_model_that_does_not_know_the_future() {
        let row = |percent: u32, factor: f64| {
            let case = Case::new().with("trace", "zipf").with("cache_percent", percent);
            let mut row = Row::new(case, UNIT);
            row.add(BIFOLIO, vec![2.0 * factor], Counts::new());
            for name in POLICIES {
                let value = if name == BELADY { 1.0 } else { 3.0 };
                row.add(name, vec![value * factor], Counts::new());
            }
            row
        };
        let rows = [row(10, 1.0), row(10, 4.0), row(25, 100.0)];
        let mean = means(&rows).unwrap();
        assert!((mean.series[BIFOLIO] - 4.0).abs() < 1e-9);
        assert!((mean.series[BEST] - 6.0).abs() < 1e-9);
        assert!(means(&rows[2..]).is_none());
        assert!(figure(&rows[0]).unwrap().met() && figure(&rows[2]).is_none());
    }

    /// The pages of a burst are used again soon after a fill and then rarely: they must not push
    /// out those that are used again and again.
    #[test]
    fn bursts_and_skew_miss_less_than_lru() {
        for generator in GENERATORS.iter().filter(|it| ["bursts", "zipf"].contains(&it.name)) {
            let (pages, name) = (20_000, generator.name.to_owned());
            let trace = Trace { name, references: (generator.generate)(pages, 200_000), pages };
            let row = run_size(&trace, SUMMARY_PERCENT, &[]).unwrap();
            let ratio = row.ratio(&OF_LRU).unwrap();
            assert!(ratio < 0.93, "{}: {ratio}", trace.name);
        }
    }
}
