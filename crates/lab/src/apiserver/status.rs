//! Every refusal of the server is a Kubernetes `Status` object with the code and the reason that a real server gives.
//!
//! Clients decide by `reason` and `code` (kube-rs retries a `Conflict`, restarts a watch on `Expired`), and people read `message`;
//! so the constructors here are named after the situation, and nothing else in the server invents codes or wording.

use serde_json::{Value, json};

use super::kind::Kind;

/// The closed set of `Status` reasons that this server uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatusReason {
    AlreadyExists,
    BadRequest,
    Conflict,
    Expired,
    Forbidden,
    InternalError,
    Invalid,
    MethodNotAllowed,
    NotAcceptable,
    NotFound,
    RequestEntityTooLarge,
    Timeout,
    Unauthorized,
    UnsupportedMediaType,
}

impl StatusReason {
    pub fn code(self) -> u16 {
        match self {
            Self::BadRequest => 400,
            Self::Unauthorized => 401,
            Self::Forbidden => 403,
            Self::NotFound => 404,
            Self::MethodNotAllowed => 405,
            Self::NotAcceptable => 406,
            Self::AlreadyExists | Self::Conflict => 409,
            Self::Expired => 410,
            Self::RequestEntityTooLarge => 413,
            Self::UnsupportedMediaType => 415,
            Self::Invalid => 422,
            Self::InternalError => 500,
            Self::Timeout => 504,
        }
    }
}

/// A refusal, ready to be sent.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    pub reason: StatusReason,
    pub message: String,
    details: Option<Value>,
}

/// One field that a validation refuses, as it appears in `details.causes`.
#[derive(Clone, Debug, PartialEq)]
pub struct StatusCause {
    pub field: String,
    pub reason: &'static str,
    pub message: String,
}

impl StatusCause {
    pub fn required(field: impl Into<String>, hint: &str) -> Self {
        let message = if hint.is_empty() { "Required value".to_owned() } else { format!("Required value: {hint}") };
        Self { field: field.into(), reason: "FieldValueRequired", message }
    }

    pub fn invalid(field: impl Into<String>, value: &Value, why: &str) -> Self {
        Self { field: field.into(), reason: "FieldValueInvalid", message: format!("Invalid value: {value}: {why}") }
    }

    pub fn forbidden(field: impl Into<String>, why: &str) -> Self {
        Self { field: field.into(), reason: "FieldValueForbidden", message: format!("Forbidden: {why}") }
    }
}

impl ApiError {
    fn new(reason: StatusReason, message: impl Into<String>) -> Self {
        Self { reason, message: message.into(), details: None }
    }

    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusReason::BadRequest, message)
    }

    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusReason::InternalError, message)
    }

    /// A path that nothing serves.
    pub fn no_such_path() -> Self {
        let mut error = Self::new(StatusReason::NotFound, "the server could not find the requested resource");
        error.details = Some(json!({}));
        error
    }

    pub fn method_not_allowed() -> Self {
        Self::new(StatusReason::MethodNotAllowed, "the server does not allow this method on the requested resource")
    }

    pub fn not_acceptable() -> Self {
        Self::new(StatusReason::NotAcceptable, "only the following media types are accepted: application/json")
    }

    /// `kubectl create` encodes built-in kinds so, and never asks for another form.
    pub fn no_protobuf() -> Self {
        let message = "this test server reads no protobuf, which `kubectl create` sends for built-in kinds: add \
                       `--dry-run=client -o yaml | kubectl apply -f -`";
        Self::new(StatusReason::UnsupportedMediaType, message)
    }

    pub fn unsupported_media_type(accepted: &str) -> Self {
        let message =
            format!("the body of the request was in an unknown format - accepted media types include: {accepted}");
        Self::new(StatusReason::UnsupportedMediaType, message)
    }

    pub fn body_too_large() -> Self {
        Self::new(StatusReason::RequestEntityTooLarge, "the body of the request is too large")
    }

    pub fn not_found(kind: &Kind, name: &str) -> Self {
        Self::about(StatusReason::NotFound, kind, name, format!("{} {name:?} not found", kind.group_resource()))
    }

    pub fn already_exists(kind: &Kind, name: &str) -> Self {
        Self::about(
            StatusReason::AlreadyExists,
            kind,
            name,
            format!("{} {name:?} already exists", kind.group_resource()),
        )
    }

    /// The resource version or uid that the client holds is not the stored one.
    pub fn conflict(kind: &Kind, name: &str, why: &str) -> Self {
        let message = format!("Operation cannot be fulfilled on {} {name:?}: {why}", kind.group_resource());
        Self::about(StatusReason::Conflict, kind, name, message)
    }

    pub fn modified(kind: &Kind, name: &str) -> Self {
        let why = "the object has been modified; please apply your changes to the latest version and try again";
        Self::conflict(kind, name, why)
    }

    pub fn forbidden(kind: &Kind, name: &str, why: &str) -> Self {
        let quoted = if name.is_empty() { String::new() } else { format!(" {name:?}") };
        let message = format!("{}{quoted} is forbidden: {why}", kind.group_resource());
        Self::about(StatusReason::Forbidden, kind, name, message)
    }

    /// Unknown credentials.
    pub fn unauthorized() -> Self {
        Self::new(StatusReason::Unauthorized, "Unauthorized")
    }

    /// Fields that a server-side apply may not take from their owners.
    pub fn apply_conflict(causes: &[StatusCause]) -> Self {
        let noun = if causes.len() == 1 { "conflict" } else { "conflicts" };
        let listed: Vec<String> = causes.iter().map(|cause| format!("{}: {}", cause.message, cause.field)).collect();
        let mut error = Self::new(
            StatusReason::Conflict,
            format!("Apply failed with {} {noun}: {}", causes.len(), listed.join(", ")),
        );
        error.details = Some(json!({"causes": causes_json(causes)}));
        error
    }

    pub fn invalid(kind: &Kind, name: &str, causes: &[StatusCause]) -> Self {
        let listed: Vec<String> = causes.iter().map(|cause| format!("{}: {}", cause.field, cause.message)).collect();
        let reasons = if listed.len() == 1 { listed.concat() } else { format!("[{}]", listed.join(", ")) };
        let qualified = match kind.group.as_str() {
            "" => kind.kind.clone(),
            group => format!("{}.{group}", kind.kind),
        };
        let mut error = Self::new(StatusReason::Invalid, format!("{qualified} {name:?} is invalid: {reasons}"));
        error.details =
            Some(json!({"name": name, "group": kind.group, "kind": kind.kind, "causes": causes_json(causes)}));
        error
    }

    /// What a real server answers to a JSON patch that does not apply, a failed `test` included: 422, and it does not say why.
    pub fn patch_does_not_apply() -> Self {
        let mut error =
            Self::new(StatusReason::Invalid, "the server rejected our request due to an error in our request");
        error.details = Some(json!({}));
        error
    }

    /// Query parameters that contradict each other, or their values. The options are named as `ListOptions` and so on.
    pub fn invalid_options(options: &str, cause: StatusCause) -> Self {
        let message = format!("{options}.meta.k8s.io \"\" is invalid: {}: {}", cause.field, cause.message);
        let mut error = Self::new(StatusReason::Invalid, message);
        error.details = Some(json!({"group": "meta.k8s.io", "kind": options, "causes": causes_json(&[cause])}));
        error
    }

    /// A patch that brings unknown fields under strict validation. A real server shows the whole patched object.
    pub fn strict_patch(why: &str) -> Self {
        let causes = [StatusCause::invalid("patch", &json!("{...}"), why)];
        let mut error = Self::new(StatusReason::Invalid, format!(" \"\" is invalid: patch: {}", causes[0].message));
        error.details = Some(json!({"causes": causes_json(&causes)}));
        error
    }

    /// The history that a watch or a list asks for has been forgotten.
    pub fn expired(asked: u64, oldest: u64) -> Self {
        Self::new(StatusReason::Expired, format!("too old resource version: {asked} ({oldest})"))
    }

    pub fn version_from_the_future(asked: u64, current: u64) -> Self {
        let mut error =
            Self::new(StatusReason::Timeout, format!("Too large resource version: {asked}, current: {current}"));
        error.details = Some(json!({
            "causes": [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}],
            "retryAfterSeconds": 1,
        }));
        error
    }

    fn about(reason: StatusReason, kind: &Kind, name: &str, message: String) -> Self {
        let mut details = json!({"name": name, "kind": kind.plural});
        if !kind.group.is_empty() {
            details["group"] = json!(kind.group);
        }
        Self { reason, message, details: Some(details) }
    }

    pub fn code(&self) -> u16 {
        self.reason.code()
    }

    pub fn to_status(&self) -> Value {
        let mut status = json!({
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": format!("{:?}", self.reason),
            "code": self.code(),
        });
        if let Some(details) = &self.details {
            status["details"] = details.clone();
        }
        status
    }
}

fn causes_json(causes: &[StatusCause]) -> Value {
    causes.iter().map(|cause| json!({"reason": cause.reason, "message": cause.message, "field": cause.field})).collect()
}

/// The answer to a deletion that is done.
pub(super) fn deleted(kind: &Kind, name: &str, uid: &str) -> Value {
    let mut details = json!({"name": name, "kind": kind.plural, "uid": uid});
    if !kind.group.is_empty() {
        details["group"] = json!(kind.group);
    }
    json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details})
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::apiserver::kind;

    #[test]
    fn messages_name_the_object_as_kubectl_users_know_it() {
        let pods = kind::builtin("", "pods").expect("pods are built in");
        let missing = ApiError::not_found(&pods, "a").to_status();
        assert_eq!(missing["message"], "pods \"a\" not found");
        assert_eq!(missing["reason"], "NotFound");
        assert_eq!(missing["code"], 404);

        let leases = kind::builtin("coordination.k8s.io", "leases").expect("leases are built in");
        let stale = ApiError::modified(&leases, "l").to_status();
        assert_eq!(stale["details"]["group"], "coordination.k8s.io");
        assert!(stale["message"].as_str().is_some_and(|text| text.contains("leases.coordination.k8s.io \"l\"")));
    }
}
