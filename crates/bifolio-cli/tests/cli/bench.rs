//! `bifolio bench`: every benchmark with smoke parameters, its report, and that it cleans up.
//!
//! Longer than 600 lines because most tests share the ways to run and to interrupt `bench`.

use std::cell::RefCell;
use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Output};
use std::thread::sleep;
use std::time::{Duration, Instant};

use bifolio_bench::{Config, ParameterSet, Report, Silent, find, render, summarise};

use crate::schema;
use crate::support::{bifolio, error_line, left_in, process_naming, run};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

const PATIENCE: Duration = Duration::from_secs(30);

fn names() -> Vec<String> {
    let list = String::from_utf8(run(&["bench", "--list"]).stdout).unwrap();
    list.lines().map(|line| line.split(' ').next().unwrap().to_owned()).collect()
}

#[test]
fn every_benchmark_runs_and_prints_its_envelope() {
    let names = names();
    for name in [
        "small-reads",
        "random-reads",
        "gather",
        "scan",
        "writes",
        "seq-reads",
        "reclaim",
        "map-reads",
        "advise",
        "warm-start",
        "hit-ratio",
    ] {
        assert!(names.iter().any(|listed| listed == name), "{name}");
    }
    for name in &names {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let dir_text = dir.path().to_str().unwrap();
        let output = run(&["bench", name, "--set", "smoke", "--json", "-", "--dir", dir_text]);
        assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
        let envelope: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(envelope["schema"], 1);
        assert_eq!(envelope["bench"], **name);
        assert!(envelope["verified_bytes"].as_u64().unwrap() > 0);
        assert!(envelope["host"]["cpus"].as_u64().unwrap() > 0);
        let host = &envelope["host"];
        assert!(host["cpu_family"].is_u64() && host["cpu_model"].is_u64());
        assert!(["memcpy", "lines", "words"].contains(&host["copy"].as_str().unwrap()));
        assert!(envelope["config"].is_object() && envelope["skipped"].is_array());
        validate_rows(&envelope);
        schema::assert_valid(&envelope);
        assert_eq!(left_in(dir.path()), Vec::<String>::new());
    }
}

fn validate_rows(envelope: &Value) {
    let rows = envelope["rows"].as_array().unwrap();
    // With one CPU some have nothing to measure, and say so.
    let lacks_a_cpu = envelope["host"]["cpus"] == 1 && envelope["skipped"][0]["series"] == "*";
    assert!(!rows.is_empty() || lacks_a_cpu);
    for row in rows {
        assert!(row["case"].is_object() && row["unit"].is_string() && row["counts"].is_object());
        let series = row["series"].as_object().unwrap();
        assert!(!series.is_empty() || row["failed"].is_object());
        for (name, median) in series {
            let median = median.as_f64().unwrap();
            let spread: Vec<f64> = serde_json::from_value(row["spread"][name].clone()).unwrap();
            assert!(median > 0.0 && spread[0] <= median && median <= spread[1], "{name}");
        }
    }
}

#[test]
fn small_reads_measures_every_series_and_where_hits_come_from() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let json = dir.path().join("envelope.json");
    let output = bifolio(&["bench", "small-reads", "--set", "smoke", "--threads", "1", "--json"])
        .arg(&json)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(String::from_utf8(output.stdout).unwrap().contains("at least"));

    let envelope: Value = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
    let skipped = envelope["skipped"].as_array().unwrap();
    let rows = envelope["rows"].as_array().unwrap();
    let is_search = |row: &&Value| row["case"]["pattern"].as_str().unwrap().starts_with("search");
    let (searches, reads): (Vec<_>, Vec<_>) = rows.iter().partition(is_search);
    assert_eq!(searches.len(), 2, "hot and uniform");
    for series in ["pin_frozen_bit", "optimistic", "read_with", "memcpy_limit"] {
        assert!(searches.iter().all(|row| row["series"][series].as_f64().unwrap() > 0.0));
    }
    assert_eq!(reads.len(), 3, "hot, uniform with 64 and with 4096 bytes");
    for row in reads {
        assert_eq!(row["case"]["fill"], "in_order");
        for series in ["kernel_pread_file", "pin_cas", "pin_frozen_bit", "optimistic"] {
            assert!(row["series"][series].as_f64().unwrap() > 0.0, "{series}");
        }
        let tmpfs = row["series"]["kernel_pread_tmpfs"].is_f64();
        assert!(tmpfs || skipped[0]["series"] == "kernel_pread_tmpfs");
        assert_eq!(row["counts"]["optimistic"]["misses_per_op"], 0.0);
        assert!(row["counts"]["optimistic"]["hits_optimistic_per_op"].as_f64().unwrap() > 0.9);
        assert!(row["counts"]["pin_cas"]["pins_per_op"].as_f64().unwrap() > 0.9);
    }
}

#[test]
fn the_kernel_alone_is_measured_if_it_is_the_target() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let dir_text = dir.path().to_str().unwrap();
    let arguments = ["bench", "--target", "kernel", "--set", "smoke", "--json", "-", "--dir"];
    let output = bifolio(&arguments).arg(dir_text).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let envelopes: Vec<Value> =
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(envelopes.len(), names().len());
    for envelope in &envelopes {
        assert_eq!(envelope["config"]["target"], "kernel");
        assert_eq!(envelope["rss"], Value::Null, "no cache was measured");
        let rows = envelope["rows"].as_array().unwrap();
        let skipped = envelope["skipped"].as_array().unwrap();
        assert!(!rows.is_empty() || !skipped.is_empty(), "{}", envelope["bench"]);
        for series in rows.iter().flat_map(|row| row["series"].as_object().unwrap().keys()) {
            assert!(series.starts_with("kernel"), "{}: {series}", envelope["bench"]);
        }
        schema::assert_valid(envelope);
    }
}

/// The envelope of a benchmark with smoke parameters and `more`.
fn envelope_of(name: &str, more: &[&str]) -> Value {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let dir_text = dir.path().to_str().unwrap();
    let output = bifolio(&["bench", name, "--set", "smoke", "--json", "-", "--dir", dir_text])
        .args(more)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Checks that `series` is in the row with all of `counts`, or skipped with a reason, or that its
/// process was killed.
fn assert_measured(envelope: &Value, row: &Value, series: &str, counts: &[&str]) {
    if row["failed"][series]["killed"] == true {
        return;
    }
    if !row["series"][series].is_f64() {
        let skipped = envelope["skipped"].as_array().unwrap();
        let reason = skipped.iter().find(|skipped| skipped["series"] == series);
        let reason = reason.unwrap_or_else(|| panic!("{series} is neither measured nor skipped"));
        assert!(!reason["reason"].as_str().unwrap().is_empty());
        return;
    }
    for count in counts {
        assert!(row["counts"][series][count].is_f64(), "{series}: {count}");
    }
}

#[test]
fn random_reads_compares_with_the_device_and_the_kernel() {
    let envelope = envelope_of("random-reads", &["--threads", "1"]);
    let rows = envelope["rows"].as_array().unwrap();
    let [rows @ .., metadata] = &rows[..] else { panic!("no rows") };
    assert_eq!(rows.len(), 2 * 2, "two patterns, two depths");
    assert!(metadata["series"]["metadata_per_resident_page"].as_f64().unwrap() > 0.0);
    let counts = ["p50_ns", "p99_ns", "p999_ns", "cpu_s_per_gib"];
    for row in rows {
        let series: &[&str] = match row["case"]["depth"].as_u64().unwrap() {
            1 => &["raw_direct", "read_at", "kernel_pread", "kernel_mmap"],
            _ => &["raw_direct", "read_many"],
        };
        for series in series {
            assert_measured(&envelope, row, series, &counts);
            // A short window may have had hits only.
            if row["counts"][series]["misses_per_op"].is_f64() {
                assert_measured(&envelope, row, series, &["syscalls_per_miss", "cpu_ns_per_miss"]);
            }
        }
        if row["case"]["pattern"] == "uniform" {
            for (series, counts) in row["counts"].as_object().unwrap() {
                let misses = counts.get("misses_per_op").and_then(Value::as_f64);
                assert!(misses.is_none_or(|misses| misses > 0.98), "{series} hit: {misses:?}");
            }
        }
    }
}

#[test]
fn scan_reads_with_both_sizes_of_calls() {
    let envelope = envelope_of("scan", &[]);
    let rows = envelope["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 2);
    for row in rows {
        for series in ["raw_direct", "read_at", "kernel_pread"] {
            assert_measured(&envelope, row, series, &["cpu_s_per_gib", "p50_ns"]);
        }
    }
}

#[test]
fn warm_start_serves_after_a_restart_with_and_without_a_list() {
    let envelope = envelope_of("warm-start", &["--threads", "1"]);
    let rows = envelope["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 5);
    for row in rows {
        for series in ["before", "restored", "cold"] {
            assert_measured(&envelope, row, series, &["hits_percent"]);
        }
        assert!(row["counts"]["restored"]["restored_mib"].is_f64());
    }
}

#[test]
fn hit_ratio_replays_generated_and_recorded_traces() {
    let envelope = envelope_of("hit-ratio", &[]);
    let rows = envelope["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 7 + 2 + 1, "the traces, a tenant twice, and the mean");
    let is_tenant = |row: &&serde_json::Value| row["case"]["trace"] == "tenant_beside_a_scan";
    for row in rows.iter().filter(is_tenant) {
        let misses = |series: &str| row["series"][series].as_f64().unwrap();
        assert!(misses("bifolio") < misses("without_floor"), "{row}");
        assert!(misses("bifolio") < misses("alone") * 1.1, "{row}");
    }
    for row in rows.iter().filter(|row| !is_tenant(row)) {
        let misses = |series: &str| row["series"][series].as_f64().unwrap();
        for series in ["bifolio", "lru", "sieve", "s3_fifo", "clock2q_plus", "arc", "lirs"] {
            assert!(misses(series) >= misses("belady") && misses(series) <= 100.0, "{series}");
        }
    }
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let trace = dir.path().join("recorded.txt");
    fs::write(&trace, "# a table, and a page of it\n1000 500\n1007\n1000,500\n").unwrap();
    let envelope = envelope_of("hit-ratio", &["--trace", trace.to_str().unwrap()]);
    assert_eq!(envelope["rows"][0]["case"]["trace"], "recorded");
    assert!(envelope["rows"][0]["series"]["lru"].as_f64().unwrap() > 99.0, "no page is kept");
    assert_eq!(envelope["verified_bytes"], 1001 * 8);

    fs::write(&trace, "12\nx\n").unwrap();
    let output = run(&["bench", "hit-ratio", "--trace", trace.to_str().unwrap()]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("recorded.txt, line 2: not a number: x"), "{said}");
}

#[test]
fn writes_compares_pages_written_and_left_alone() {
    let envelope = envelope_of("writes", &["--size", "4M", "--memory", "1M"]);
    let rows = envelope["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 4);
    let mut turns = 0;
    for row in rows {
        let rival = match row["case"]["pattern"].as_str() {
            Some("records") => Some("kernel_direct"),
            // Records of a log are no whole pages.
            Some("log" | "random") => None,
            _ => Some("raw_direct"),
        };
        for series in ["write_at", "kernel_write"].into_iter().chain(rival) {
            assert_measured(&envelope, row, series, &["cpu_s_per_gib", "max_ns"]);
        }
        let repetitions = row["repetitions"].as_object().unwrap().values();
        turns += repetitions.map(|values| values.as_array().unwrap().len()).sum::<usize>();
    }
    assert_eq!(envelope["verified_bytes"].as_u64().unwrap(), turns as u64 * (4 << 20));
    for pattern in ["log", "records"] {
        let row = rows.iter().find(|row| row["case"]["pattern"] == pattern).unwrap();
        let flushes_per_sync = row["counts"]["write_at"]["flushes_per_sync"].as_f64().unwrap();
        assert!(flushes_per_sync > 0.0 && flushes_per_sync <= 1.0);
    }
}

#[test]
fn seq_reads_measures_every_layout_and_size() {
    let envelope = envelope_of("seq-reads", &["--threads", "1"]);
    let rows = envelope["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 2 * 2 * 3, "layouts, sizes of folios, sizes of blocks");
    let cases: HashSet<String> = rows.iter().map(|row| row["case"].to_string()).collect();
    assert_eq!(cases.len(), rows.len());
    for row in rows {
        assert_measured(&envelope, row, "kernel_tmpfs", &[]);
        for series in ["one_by_one", "batched", "memcpy_limit"] {
            assert!(row["series"][series].as_f64().unwrap() > 0.0, "{series}");
            assert_eq!(row["repetitions"][series].as_array().unwrap().len(), 2);
        }
    }
}

#[test]
fn reclaim_measures_all_series_and_compares_every_page() {
    let envelope = envelope_of("reclaim", &["--threads", "2"]);
    let rows = envelope["rows"].as_array().unwrap();
    let patterns: Vec<_> = rows.iter().map(|row| row["case"]["pattern"].as_str()).collect();
    assert_eq!(patterns, [Some("sequential"), Some("random")]);
    let counts =
        ["tlb_shootdowns", "function_call_ipis", "p50_ns", "p99_ns", "p999_ns", "peak_bytes"];
    let of_reclaim = ["pgscan", "pgsteal", "pages_evicted", "pages_written"];
    for row in rows {
        assert_eq!(row["case"]["workers"], 2);
        assert_eq!(row["unit"], "bogo ops/s");
        for series in ["kernel_swap", "kernel_mmap"] {
            assert_measured(&envelope, row, series, &counts);
            assert_measured(&envelope, row, series, &of_reclaim);
        }
        for batch in ["folio", "batch_8", "batch_31", "batch_128", "batch_512"] {
            let series = format!("flush_per_{batch}");
            assert_measured(&envelope, row, &series, &counts);
            assert_measured(&envelope, row, &series, &of_reclaim);
            assert_measured(&envelope, row, &series, &["flushes", "faults"]);
        }
    }
    // In one of the series at least: the windows are short, pages are evicted in large batches, and
    // on a busy machine a window may be too short for a batch.
    let counts = rows.iter().flat_map(|row| row["counts"].as_object().unwrap());
    let evicted = counts.filter(|(series, _)| series.starts_with("flush_per_"));
    let evicted = evicted.filter_map(|(_, counts)| counts["pages_evicted"].as_f64());
    assert!(evicted.reduce(f64::max).is_none_or(|pages| pages > 0.0), "nothing was evicted");
    // Eight words of each page, of each series, at the end, whatever the windows had time for.
    let pages = envelope["config"]["size_bytes"].as_u64().unwrap() / 4096;
    let series = rows[0]["series"].as_object().unwrap().len() as u64;
    assert!(envelope["verified_bytes"].as_u64().unwrap() > series * pages * 64);
}

#[test]
fn map_reads_loads_with_every_number_of_threads() {
    let envelope = envelope_of("map-reads", &[]);
    let rows = envelope["rows"].as_array().unwrap();
    let threads = envelope["host"]["cpus"].as_u64().unwrap().min(2) as usize;
    assert_eq!(rows.len(), 2 * threads, "hot and uniform");
    let cases: HashSet<String> = rows.iter().map(|row| row["case"].to_string()).collect();
    assert_eq!(cases.len(), rows.len());
    for row in rows {
        for series in ["map", "kernel_small", "kernel_mapping"] {
            assert_measured(&envelope, row, series, &[]);
        }
        if row["series"]["map"].is_f64() {
            assert_eq!(row["counts"]["map"]["faults_per_op"], 0.0, "all is resident");
        }
    }
}

#[test]
fn advise_measures_every_policy_and_ours_drains_exactly() {
    let envelope = envelope_of("advise", &[]);
    if envelope["host"]["cpus"] == 1 {
        let reason = envelope["skipped"][0]["reason"].as_str().unwrap();
        assert!(reason.contains("needs 2 CPUs"), "{reason}");
        return;
    }
    let counts = ["p50_ns", "p99_ns", "rounds_evicted", "remaining"];
    let of_caches = ["drains_per_round", "cpus_drained_per_round", "remaining_mapped"];
    let drains = |row: &Value, series: &str| {
        let count = |name: &str| row["counts"][series][name].as_f64();
        count("drains_per_round").zip(count("cpus_drained_per_round"))
    };
    for row in envelope["rows"].as_array().unwrap() {
        assert_eq!(row["unit"], "ns/call");
        for series in ["drain_on_any_failure", "drain_when_it_can_help", "targeted"] {
            assert_measured(&envelope, row, series, &counts);
            assert_measured(&envelope, row, series, &of_caches);
        }
        let targeted = drains(row, "targeted");
        let expected = match row["case"]["workload"].as_str().unwrap() {
            "mapped_stream" => {
                assert_measured(&envelope, row, "kernel", &counts);
                let calls = drains(row, "drain_on_any_failure").map(|(drains, _)| drains);
                assert!(calls.is_none_or(|calls| calls == 8.0), "each of the calls drains");
                (0.0, 0.0)
            }
            other => {
                assert_eq!(other, "fallback");
                assert_measured(&envelope, row, "kernel", &counts);
                let counts = &row["counts"]["targeted"];
                assert_eq!(counts["rounds_evicted"], counts["rounds"]);
                (1.0, 1.0)
            }
        };
        assert!(targeted.is_none_or(|targeted| targeted == expected), "{targeted:?}: {row}");
    }
}

#[test]
fn a_closed_pipe_ends_a_benchmark_quietly() {
    let mut child = bifolio(&["bench", "map-reads", "--set", "smoke"]).spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    assert!(!String::from_utf8(output.stderr).unwrap().contains("panicked"));
}

#[test]
fn a_directory_that_takes_no_files_is_one_sentence() {
    let output = run(&["bench", "map-reads", "--set", "smoke", "--dir", "/proc"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(error_line(&output).contains("/proc"));
    assert!(output.stdout.is_empty());
}

#[test]
fn a_run_without_room_is_refused_before_it_makes_anything() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let dir_text = dir.path().to_str().unwrap();
    let output = run(&["bench", "random-reads", "--dir", dir_text, "--memory", "512G"]);
    assert_eq!(output.status.code(), Some(2));
    let line = error_line(&output);
    assert!(line.contains("needs") && (line.contains("available") || line.contains("free")));
    assert_eq!(left_in(dir.path()), Vec::<String>::new());
}

/// Runs a benchmark whose children run `script` first, with their request in `$1`: it may kill
/// them.
fn report_with_children(name: &str, script: &str) -> Report {
    let program = env!("CARGO_BIN_EXE_bifolio");
    let script = format!("{script}\nexec {program} bench-child \"$1\"");
    let command = ["sh", "-c", &script, "sh"].map(str::to_owned).to_vec();
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut config = Config::new(ParameterSet::Smoke, command);
    config.dir = Some(dir.path().to_owned());
    config.threads = Some(vec![1]);
    let report = bifolio_bench::run(find(name).unwrap(), &config, &mut Silent)
        .unwrap_or_else(|error| panic!("{name}: {error}"));
    schema::assert_valid(&serde_json::to_value(&report).unwrap());
    assert_eq!(left_in(dir.path()), Vec::<String>::new());
    report
}

#[test]
fn no_benchmark_ends_because_all_its_children_are_killed() {
    // The children of random-reads are the kernel's only, and need a control group.
    for name in ["gather", "reclaim"] {
        let report = report_with_children(name, "kill -KILL $$");
        let skipped = report.skipped.iter().map(|skipped| skipped.reason.as_str());
        let failed = report.rows.iter().flat_map(|row| row.failed.values());
        let mut reasons = skipped.chain(failed.map(|failure| failure.reason.as_str()));
        assert!(reasons.any(|reason| reason.contains("killed")), "{name}: {:?}", report.skipped);
        assert!(!report.has_failed());
    }
}

/// The first child of the series lives, the one that shows whether the series can run.
#[test]
fn a_series_whose_child_is_killed_twice_is_a_word_in_its_row() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let children = dir.path().join("children");
    let dies_after_the_first = |text: &str| {
        let _ = fs::remove_file(&children);
        let children = children.display();
        format!(
            "case \"$1\" in *{text}*) echo >> {children}\n\
             [ $(wc -l < {children}) = 1 ] || kill -KILL $$;; esac"
        )
    };
    let report = report_with_children("reclaim", &dies_after_the_first("flush_per_folio"));
    assert_eq!(fs::read_to_string(&children).unwrap().lines().count(), 3, "one, and two attempts");
    assert_eq!(report.rows.len(), 2);
    for row in &report.rows {
        assert!(row.failed["flush_per_folio"].killed && row.failed.len() == 1);
        assert!(row.series["flush_per_batch_31"] > 0.0);
        assert!(!row.series.contains_key("flush_per_folio"));
    }
    let text = render(&report);
    assert!(text.contains("killed flush_per_folio, workers 1, pattern random: its "), "{text}");
    assert!(summarise(&[report], 1).contains("reclaim: killed flush_per_folio;"));

    let report = report_with_children("gather", &dies_after_the_first("read_many"));
    assert!(report.rows.iter().any(|row| row.failed["read_many"].killed));
    assert!(report.rows.iter().all(|row| row.series["pin_many"] > 0.0));
}

/// At most a page of output, written for first-time users; the smoke run prints half of one.
#[test]
fn the_summary_fits_a_page_and_survives_an_interrupt() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let page = dir.path().join("report.html");
    let page_text = page.to_str().unwrap();
    let whole = run(&["bench", "--set", "smoke", "--report", page_text]);
    assert!(whole.status.success(), "{}", String::from_utf8_lossy(&whole.stderr));
    let whole = String::from_utf8(whole.stdout).unwrap();
    let lines: Vec<&str> = whole.lines().collect();
    assert!((20..=50).contains(&lines.len()), "{whole}");
    let is_wide = |line: &&&str| line.len() > 80;
    assert_eq!(lines.iter().find(is_wide), None, "{whole}");
    assert!(!whole.contains("MET"), "{whole}");
    assert!(whole.contains("1. Reference count") && !whole.contains("Incomplete"), "{whole}");

    let ids = sections_of(&page);
    assert!(names().iter().all(|name| ids.contains(name)), "{ids:?}");
    assert!(!fs::read_to_string(&page).unwrap().contains("are missing"));

    let other_page = dir.path().join("interrupted.html");
    let mut command = bifolio(&["bench", "--set", "smoke", "--report"]);
    let child = command.arg(&other_page).spawn().unwrap();
    let has_one = || fs::read_to_string(&other_page).is_ok_and(|text| text.contains("<table>"));
    let output = signal_when(child, Signal::INT, has_one);
    assert_eq!(output.status.code(), Some(130));
    let part = String::from_utf8(output.stdout).unwrap();
    assert!(part.contains("Incomplete: ") && part.lines().count() < lines.len(), "{part}");
    let ids = sections_of(&other_page);
    assert!(ids.contains(&names()[0]) && ids.len() < names().len(), "{ids:?}");
    assert!(fs::read_to_string(&other_page).unwrap().contains("are missing"));
}

/// Parses a page of `--report`, which loads nothing. Returns the ids of its sections.
fn sections_of(page: &Path) -> Vec<String> {
    let text = fs::read_to_string(page).unwrap();
    let options = roxmltree::ParsingOptions { allow_dtd: true, ..Default::default() };
    let document = roxmltree::Document::parse_with_options(&text, options).unwrap();
    for element in document.descendants().filter(roxmltree::Node::is_element) {
        let name = element.tag_name().name();
        assert!(!["script", "link", "img", "iframe"].contains(&name), "{name}");
        let target = element.attribute("href").or(element.attribute("src"));
        assert!(target.is_none_or(|target| target.starts_with('#')), "{target:?}");
    }
    let sections = document.descendants().filter(|element| element.has_tag_name("section"));
    sections.filter_map(|section| section.attribute("id").map(str::to_owned)).collect()
}

#[test]
fn reports_of_engines_are_added_and_other_files_refused() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let [page, engines, wrong] = ["page.html", "engines.json", "wrong"].map(|name| {
        let path = dir.path().join(name);
        path.to_str().unwrap().to_owned()
    });
    let row = r#"{"case":{"work":"point","data":"8x"},"unit":"ops/s","series":{"bifolio":5678}}"#;
    let engine =
        format!(r#"{{"schema":1,"bench":"redb<i>","host":{{}},"config":{{}},"rows":[{row}]}}"#);
    fs::write(&engines, engine).unwrap();
    fs::write(&wrong, "\n{}").unwrap();
    let arguments = ["bench", "advise", "--set", "smoke", "--report", &page, "--with"];
    let output = bifolio(&arguments).arg(&engines).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(sections_of(Path::new(&page)), ["advise", "redb<i>", "features"]);
    let objects = concat!(env!("CARGO_MANIFEST_DIR"), "/../bifolio-report/tests/objects.json");
    schema::assert_valid(&serde_json::from_slice(&fs::read(objects).unwrap()).unwrap());
    let output = bifolio(&arguments).args([&engines, "--with", objects]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(sections_of(Path::new(&page)), ["advise", "redb<i>", "objects", "features"]);
    let refused = bifolio(&arguments).arg(&wrong).output().unwrap();
    assert_eq!(refused.status.code(), Some(2));
    assert!(error_line(&refused).contains("wrong, line 2"));
}

#[test]
fn figures_are_judged_on_demand() {
    let output = run(&["bench", "advise", "--set", "smoke", "--check"]);
    let error = String::from_utf8(output.stderr).unwrap();
    let has_missed = error.contains("missed: ");
    assert_eq!(output.status.code(), Some(i32::from(has_missed)), "{error}");
}

#[test]
fn interrupted_while_making_files_it_leaves_nothing() {
    interrupt(&["--size", "256M"], Signal::INT, |dir| !left_in(dir).is_empty());
}

#[test]
fn terminated_while_measuring_it_leaves_no_mount() {
    // The copy in memory is made just before measuring; without one, time has to do.
    let begin = Instant::now();
    interrupt(&["--seconds", "600"], Signal::TERM, |dir| {
        left_in(dir).len() > 1 || begin.elapsed() > Duration::from_secs(5)
    });
}

#[test]
fn terminated_while_a_child_measures_it_leaves_no_process() {
    interrupt_bench("gather", &["--seconds", "600"], Signal::TERM, |dir| {
        // Only the child's request names a file in the workspace. Stopped, it cannot end by itself.
        let child = workspace_in(dir).and_then(|path| process_naming(&format!("{path}/file")));
        child.is_some_and(|child| kill_process(child, Signal::STOP).is_ok())
    });
}

#[test]
fn a_terminated_run_leaves_no_control_group() {
    let group = RefCell::new(None);
    let more = ["--seconds", "600", "--threads", "1"];
    let begin = Instant::now();
    interrupt_bench("random-reads", &more, Signal::TERM, |dir| {
        let child = workspace_in(dir).and_then(|path| process_naming(&format!("{path}/file")));
        let found = child.and_then(own_group_of);
        if let Some(found) = found {
            group.replace(Some(found));
        }
        // Where groups cannot be made there is none to find.
        group.borrow().is_some() || begin.elapsed() > Duration::from_secs(5)
    });
    if let Some(group) = group.take() {
        assert!(!group.exists(), "{}", group.display());
    }
}

#[test]
fn terminated_while_the_kernel_swaps_it_leaves_no_swap_active() {
    let swap = RefCell::new(None);
    let begin = Instant::now();
    let more = ["--memory", "16M", "--seconds", "600"];
    interrupt_bench("reclaim", &more, Signal::TERM, |dir| {
        swap.replace(swap_in_use_below(dir).or(swap.take()));
        // Where the kernel cannot be given a swap file there is none to find.
        swap.borrow().is_some() || begin.elapsed() > Duration::from_secs(15)
    });
    if let Some(swap) = swap.take() {
        let active = fs::read_to_string("/proc/swaps").unwrap();
        assert!(!active.contains(&swap), "{active}");
    }
}

/// An active swap file below `dir` that has pages in it.
fn swap_in_use_below(dir: &Path) -> Option<String> {
    let active = fs::read_to_string("/proc/swaps").ok()?;
    let line = active.lines().find(|line| line.starts_with(dir.to_str().unwrap()))?;
    let fields: Vec<&str> = line.split_whitespace().collect();
    (fields.get(3)?.parse::<u64>().ok()? > 0).then(|| fields[0].to_owned())
}

/// The control group that a benchmark made for process `child`, once that has joined it.
fn own_group_of(child: Pid) -> Option<PathBuf> {
    let text = fs::read_to_string(format!("/proc/{}/cgroup", child.as_raw_nonzero())).ok()?;
    let line = text.lines().find(|line| line.contains("/bifolio-bench-"))?;
    let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
    let root = if controllers.is_empty() { "" } else { "/memory" };
    Some(PathBuf::from(format!("/sys/fs/cgroup{root}{path}")))
}

fn workspace_in(dir: &Path) -> Option<String> {
    let entry = fs::read_dir(dir).ok()?.next()?.ok()?;
    Some(entry.path().display().to_string())
}

fn interrupt(more: &[&str], signal: Signal, ready: impl Fn(&Path) -> bool) {
    interrupt_bench("small-reads", more, signal, ready);
}

/// Starts a benchmark, signals it once `ready`, and checks that it ends and cleans up.
fn interrupt_bench(name: &str, more: &[&str], signal: Signal, ready: impl Fn(&Path) -> bool) {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let dir_text = dir.path().to_str().unwrap();
    let child =
        bifolio(&["bench", name, "--set", "smoke", "--dir", dir_text]).args(more).spawn().unwrap();
    let output = signal_when(child, signal, || ready(dir.path()));
    assert_eq!(output.status.code(), Some(130), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(left_in(dir.path()), Vec::<String>::new());
    let deadline = Instant::now() + PATIENCE;
    while let Some(survivor) = process_naming(dir_text) {
        if Instant::now() > deadline {
            let _ = kill_process(survivor, Signal::KILL);
            panic!("a process outlives the program");
        }
        sleep(Duration::from_millis(10));
    }
}

fn signal_when(mut child: Child, signal: Signal, ready: impl Fn() -> bool) -> Output {
    let deadline = Instant::now() + PATIENCE;
    while !ready() {
        let ended = child.try_wait().unwrap();
        assert!(ended.is_none(), "it ended before it could be interrupted: {ended:?}");
        assert!(Instant::now() < deadline, "it never came to the point to be interrupted at");
        sleep(Duration::from_millis(2));
    }
    kill_process(Pid::from_child(&child), signal).unwrap();
    child.wait_with_output().unwrap()
}
