//! The status codes of gRPC.

/// How a gRPC call ended: the number in `grpc-status`
/// ([statuscodes.md](https://github.com/grpc/grpc/blob/master/doc/statuscodes.md) of grpc/grpc).
///
/// tonic's `Code` has the same numbers: `tonic::Code::from(code.number())`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum GrpcCode {
    /// 0: it succeeded.
    Ok = 0,
    /// 1: it was cancelled, usually by its caller.
    Cancelled = 1,
    /// 2: an error that nobody classified.
    Unknown = 2,
    /// 3: an argument is wrong, whatever the state of the system.
    InvalidArgument = 3,
    /// 4: the time was over. The operation may have completed.
    DeadlineExceeded = 4,
    /// 5: something that was asked for does not exist.
    NotFound = 5,
    /// 6: something that was to be made exists.
    AlreadyExists = 6,
    /// 7: this caller may not.
    PermissionDenied = 7,
    /// 8: a quota or a resource is used up.
    ResourceExhausted = 8,
    /// 9: the state of the system does not allow it; a retry needs a change first.
    FailedPrecondition = 9,
    /// 10: it was given up, usually for a conflict; to be retried at a higher level.
    Aborted = 10,
    /// 11: past the valid range.
    OutOfRange = 11,
    /// 12: there is no such method.
    Unimplemented = 12,
    /// 13: something that must hold does not.
    Internal = 13,
    /// 14: the service is not available now; the one code that clients retry by themselves.
    Unavailable = 14,
    /// 15: data was lost or damaged for good.
    DataLoss = 15,
    /// 16: the caller is not known.
    Unauthenticated = 16,
}

impl GrpcCode {
    /// All codes, by number.
    pub const ALL: &'static [Self] = &[
        Self::Ok,
        Self::Cancelled,
        Self::Unknown,
        Self::InvalidArgument,
        Self::DeadlineExceeded,
        Self::NotFound,
        Self::AlreadyExists,
        Self::PermissionDenied,
        Self::ResourceExhausted,
        Self::FailedPrecondition,
        Self::Aborted,
        Self::OutOfRange,
        Self::Unimplemented,
        Self::Internal,
        Self::Unavailable,
        Self::DataLoss,
        Self::Unauthenticated,
    ];

    /// The number, as `grpc-status` has it.
    pub const fn number(self) -> i32 {
        self as i32
    }

    /// The code with this number; `None` where there is none, which gRPC reads as
    /// [`Unknown`](Self::Unknown).
    pub fn from_number(number: i32) -> Option<Self> {
        let index = usize::try_from(number).ok()?;
        Self::ALL.get(index).copied()
    }

    /// The name as the specification writes it: `FAILED_PRECONDITION`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ok => "OK",
            Self::Cancelled => "CANCELLED",
            Self::Unknown => "UNKNOWN",
            Self::InvalidArgument => "INVALID_ARGUMENT",
            Self::DeadlineExceeded => "DEADLINE_EXCEEDED",
            Self::NotFound => "NOT_FOUND",
            Self::AlreadyExists => "ALREADY_EXISTS",
            Self::PermissionDenied => "PERMISSION_DENIED",
            Self::ResourceExhausted => "RESOURCE_EXHAUSTED",
            Self::FailedPrecondition => "FAILED_PRECONDITION",
            Self::Aborted => "ABORTED",
            Self::OutOfRange => "OUT_OF_RANGE",
            Self::Unimplemented => "UNIMPLEMENTED",
            Self::Internal => "INTERNAL",
            Self::Unavailable => "UNAVAILABLE",
            Self::DataLoss => "DATA_LOSS",
            Self::Unauthenticated => "UNAUTHENTICATED",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_leads_back_to_its_code() {
        assert_eq!(GrpcCode::ALL.len(), 17);
        for code in GrpcCode::ALL {
            assert_eq!(GrpcCode::from_number(code.number()), Some(*code));
        }
        for none in [-1, 17, i32::MAX, i32::MIN] {
            assert_eq!(GrpcCode::from_number(none), None);
        }
    }
}
