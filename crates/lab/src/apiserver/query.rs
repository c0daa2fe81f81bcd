//! The query parameters of a request, each with its type.

use super::status::ApiError;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum FieldValidation {
    Ignore,
    #[default]
    Warn,
    Strict,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Query {
    pub label_selector: String,
    pub field_selector: String,
    pub limit: Option<usize>,
    pub continue_from: String,
    /// None: not given, which asks for the latest state.
    pub resource_version: Option<u64>,
    pub resource_version_match: String,
    pub watch: bool,
    pub bookmarks: bool,
    pub send_initial_events: Option<bool>,
    pub timeout_secs: Option<u64>,
    pub dry_run: bool,
    pub field_manager: String,
    pub field_validation: FieldValidation,
    pub force: bool,
    pub include_object: String,
}

impl Query {
    pub(super) fn parse(pairs: &[(String, String)]) -> Result<Self, ApiError> {
        let mut query = Self::default();
        for (name, value) in pairs {
            match name.as_str() {
                "labelSelector" => query.label_selector.clone_from(value),
                "fieldSelector" => query.field_selector.clone_from(value),
                "limit" => query.limit = number(name, value)?.filter(|&limit| limit > 0),
                "continue" => query.continue_from.clone_from(value),
                "resourceVersion" => query.resource_version = number(name, value)?,
                "resourceVersionMatch" => query.resource_version_match.clone_from(value),
                "watch" => query.watch = flag(value),
                "allowWatchBookmarks" => query.bookmarks = flag(value),
                "sendInitialEvents" => query.send_initial_events = Some(flag(value)),
                "timeoutSeconds" => query.timeout_secs = number(name, value)?,
                "dryRun" => query.dry_run = value == "All",
                "fieldManager" => query.field_manager.clone_from(value),
                "fieldValidation" => query.field_validation = field_validation(value)?,
                "force" => query.force = flag(value),
                "includeObject" => query.include_object.clone_from(value),
                _ => {}
            }
        }
        Ok(query)
    }
}

fn flag(value: &str) -> bool {
    !matches!(value, "0" | "false" | "False" | "FALSE")
}

fn number<N: std::str::FromStr>(name: &str, value: &str) -> Result<Option<N>, ApiError> {
    if value.is_empty() {
        return Ok(None);
    }
    let unreadable = |_| ApiError::bad_request(format!("{name}: Invalid value: {value:?}"));
    value.parse().map(Some).map_err(unreadable)
}

fn field_validation(value: &str) -> Result<FieldValidation, ApiError> {
    match value {
        "Ignore" => Ok(FieldValidation::Ignore),
        "" | "Warn" => Ok(FieldValidation::Warn),
        "Strict" => Ok(FieldValidation::Strict),
        other => Err(ApiError::bad_request(format!("fieldValidation: Invalid value: {other:?}"))),
    }
}
