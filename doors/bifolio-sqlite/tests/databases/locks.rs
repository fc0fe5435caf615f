//! Other processes are locked out; other connections of this process are let in.

use crate::shell::{Shell, has_sqlite, through_the_cache, through_the_system, with_cache};

#[test]
fn other_processes_are_locked_out_until_the_last_close() {
    if !has_sqlite() {
        return;
    }
    for mode in ["delete", "wal"] {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("x.db");
        let made =
            format!("pragma journal_mode={mode}; create table t(a); insert into t values(7)");
        through_the_system(&path, &made);
        let mut shell = Shell::start(with_cache(&path, ""));
        assert_eq!(shell.ask("select a from t;"), "7");
        let (_, errors) = through_the_system(&path, "select a from t");
        assert!(errors.contains("locked"), "{mode}, the system's VFS: {errors}");
        let (_, errors) = through_the_cache(&path, "select a from t;\n");
        assert!(errors.contains("locked"), "{mode}, another process: {errors}");
        let again = format!(
            "attach 'file:{}?vfs=bifolio' as again;\nselect a from again.t;\ndetach again;",
            path.display()
        );
        assert_eq!(shell.ask(&again), "7", "{mode}, this process");
        let (_, errors) = through_the_system(&path, "select a from t");
        assert!(errors.contains("locked"), "{mode}, after a detach: {errors}");
        assert_eq!(shell.end(), "");
        let (out, errors) = through_the_system(&path, "insert into t values(8); select a from t");
        assert_eq!(out, "7\n8\n", "{errors}");
    }
}
