//! The tests whose results differ, and the list of those that are expected to.
//!
//! A line of the list that starts at the margin is a reason; the indented lines below it are the
//! tests that it explains: `FILE TEST...`, where `*` stands for any text. The file has its
//! permutation before it (`wal/trans.test`), unless that is `veryquick`. A `-` before the name of a
//! test means that it is missing in the run with this VFS, `(end)` that the file does not come to
//! its end, and `(skip)` that the file is not run. A `?` before it all means that the tests need
//! not differ in each run.

use crate::runs::Run;

/// The test name that stands for the end of a file.
const END: &str = "(end)";
/// The test name of a file that is not run.
pub(crate) const SKIP: &str = "(skip)";

/// Tests that fail or are missing in `ours` and pass in the system's run.
pub(crate) fn differences(ours: &Run, systems: &Run) -> Vec<String> {
    let mut found = Vec::new();
    for name in systems.tests.iter().filter(|(_, passed)| **passed).map(|(name, _)| name) {
        match ours.tests.get(name) {
            Some(false) => found.push(name.clone()),
            // A file that does not come to its end misses many: the end stands for them.
            None if ours.interruption.is_none() => found.push(format!("-{name}")),
            _ => {}
        }
    }
    let is_new = |name: &&String| !systems.tests.contains_key(*name);
    let failed = ours.tests.iter().filter(|(_, passed)| !**passed).map(|(name, _)| name);
    found.extend(failed.filter(is_new).cloned());
    if ours.interruption.is_some() && systems.interruption.is_none() {
        found.push(END.to_owned());
    }
    found
}

/// Tests that are expected to differ.
pub(crate) struct Expectations(Vec<Expectation>);

struct Expectation {
    file: String,
    pattern: String,
    /// Set once a difference has matched, or if none need match.
    is_used: bool,
}

impl Expectations {
    pub(crate) fn new(list: &str) -> Self {
        let mut expectations = Vec::new();
        let mut has_reason = false;
        for line in list.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
            if !line.starts_with(' ') {
                has_reason = true;
                continue;
            }
            assert!(has_reason, "no reason above: {line}");
            let mut words = line.split_whitespace();
            let file = words.next().unwrap();
            for pattern in words {
                let varying = pattern.strip_prefix('?');
                expectations.push(Expectation {
                    file: file.to_owned(),
                    pattern: varying.unwrap_or(pattern).to_owned(),
                    is_used: varying.is_some(),
                });
            }
        }
        Self(expectations)
    }

    /// Returns `true` if the list has a test.
    pub(crate) fn contains(&mut self, file: &str, test: &str) -> bool {
        let mut found = false;
        for expectation in self.0.iter_mut().filter(|one| matches(&one.file, file)) {
            if matches(&expectation.pattern, test) {
                expectation.is_used = true;
                found = true;
            }
        }
        found
    }

    /// The patterns for a file that no difference has matched.
    pub(crate) fn unused(&self, file: &str) -> Vec<String> {
        let unused = self.0.iter().filter(|one| one.file == file && !one.is_used);
        unused.map(|one| one.pattern.clone()).collect()
    }

    /// The files that the list names, as patterns.
    pub(crate) fn files(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|expectation| expectation.file.as_str())
    }
}

/// Returns `true` if a text matches a pattern in which `*` stands for any text.
pub(crate) fn matches(pattern: &str, text: &str) -> bool {
    let Some((start, rest)) = pattern.split_once('*') else { return pattern == text };
    let Some(text) = text.strip_prefix(start) else { return false };
    (0..=text.len()).any(|from| text.is_char_boundary(from) && matches(rest, &text[from..]))
}

#[test]
fn patterns_match_whole_names() {
    assert!(matches("wal-1.*", "wal-1.2"));
    assert!(matches("*", ""));
    assert!(matches("a*c*e", "abcde"));
    assert!(!matches("a*c*e", "abcdef"));
    assert!(!matches("wal-1", "wal-1.2"));
}
