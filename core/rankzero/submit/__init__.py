"""The submitter's process checks a job, packs function, arguments and modules, names the training, starts a driver.

Ranks do not run this code, and drivers, agents and workers do not import it.
"""

from rankzero import lazy_names

lazy_names(
    __name__,
    "content.digest_of drivers.start_driver identity.identity_of imports.imports_of_code params.MAX_PARAMS "
    "params.MAX_TEXT params.params_of paths.manifest_of_path payload.build payload.Payload submission.submit "
    "trackers.pack user_code.UserCode",
)
