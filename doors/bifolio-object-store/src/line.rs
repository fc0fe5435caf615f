//! What differs between the lines of `object_store`: results of 0.13 have no extensions.

use std::ops::Range;

use super::object_store;
use object_store::path::Path;
use object_store::{Attributes, GetResult, GetResultPayload, ListResult, ObjectMeta};

pub(crate) fn get_result(
    payload: GetResultPayload,
    meta: ObjectMeta,
    range: Range<u64>,
    attributes: Attributes,
) -> GetResult {
    GetResult { payload, meta, range, attributes }
}

pub(crate) fn list_result(common_prefixes: Vec<Path>, objects: Vec<ObjectMeta>) -> ListResult {
    ListResult { common_prefixes, objects }
}
