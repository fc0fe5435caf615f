//! A host without standard streams: no file of a database or of the cache takes their numbers.

use std::ffi::OsString;
use std::fs;
use std::process::Command;

use crate::shell::{has_sqlite, modes_and_kinds, through_the_system, with_cache};

#[test]
fn no_file_of_a_host_without_standard_streams_takes_their_numbers() {
    if !has_sqlite() {
        return;
    }
    for (mode, kind) in modes_and_kinds() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("database");
        let found = directory.path().join("found");
        let hosted = with_cache(&path, &format!("bifolio_memory=2MiB&{kind}"));
        let mut words: Vec<OsString> = vec!["exec \"$@\" <&- >&- 2>&-".into(), "sh".into()];
        words.push(hosted.get_program().into());
        words.extend(hosted.get_args().map(OsString::from));
        let links = "/proc/$PPID/fd/0 /proc/$PPID/fd/1 /proc/$PPID/fd/2";
        let look = format!(".shell ls -l {links} > {} 2>&1", found.display());
        let statements = [
            format!("pragma journal_mode={mode}; create table t(x); insert into t values(1);"),
            "update t set x = 2;".to_owned(),
        ];
        words.push(":memory:".into());
        words.extend(statements.map(OsString::from));
        words.push(look.into());
        let status = Command::new("sh").arg("-c").args(words).status().unwrap();
        let links = fs::read_to_string(&found).unwrap_or_default();
        let directory = directory.path().to_str().unwrap();
        assert!(!links.contains(&format!("-> {directory}")), "{mode}, {kind}: {status}: {links}");
        let rows = through_the_system(&path, "select x from t; pragma integrity_check;");
        assert_eq!(rows.0, "2\nok\n", "{mode}, {kind}: {status}: {rows:?}");
    }
}
