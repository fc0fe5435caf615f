//! Errors of the cache as Python exceptions.

use bifolio::ErrorKind;
use pyo3::PyErr;
use pyo3::exceptions::{PyOSError, PyValueError};

/// Returns the exception for an error: `ValueError` for a closed cache or an invalid setting, as
/// `io` raises, else the subclass of `OSError` for its number, with the name of the file.
pub(crate) fn exception(error: &bifolio::Error) -> PyErr {
    let text = error.to_string();
    match error.kind() {
        ErrorKind::Closed | ErrorKind::Config => PyValueError::new_err(text),
        _ => {
            let file = error.file().map(str::to_owned);
            // Python adds the name at the end.
            let prefix = file.as_ref().map(|file| format!("{file}: ")).unwrap_or_default();
            let message = text.strip_prefix(&prefix).unwrap_or(&text).to_owned();
            PyOSError::new_err((error.errno(), message, file))
        }
    }
}
